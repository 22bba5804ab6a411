"""Commands of `mlx-ring`: a thin shell over the other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""
_TABLE_WIDTH = 300


def table_console() -> Console:
    """Return a console for tables of names and addresses, which are useless if they are cut or broken.

    A narrow terminal wraps the lines itself, and pipes get each row in a line. Names are no markup.
    """
    from rich.console import Console  # slow to import, and few commands print a table

    return Console(width=_TABLE_WIDTH, soft_wrap=True, highlight=False, markup=False, emoji=False)
