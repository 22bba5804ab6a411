"""Commands of `mlx-ring`: a thin shell over the other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""
_TABLE_WIDTH = 300
_LEAST_WIDTH = 80


def table_console() -> Console:
    """Return a console for tables of names and addresses, which are useless if they are cut or broken.

    A narrow terminal wraps the lines itself, and pipes get each row in a line. Names are no markup.
    """
    from rich.console import Console  # slow to import, and few commands print a table

    return Console(width=_TABLE_WIDTH, soft_wrap=True, highlight=False, markup=False, emoji=False)


def report_console() -> Console:
    """Return a console for tables whose cells may break. It has 80 columns at least: fewer would cut names and numbers.

    A narrower terminal wraps the lines itself. Names are no markup.
    """
    from rich.console import Console  # as above

    width = max(_LEAST_WIDTH, Console().width)
    return Console(width=width, soft_wrap=True, highlight=False, markup=False)
