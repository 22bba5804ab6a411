"""Brings transformers' tokenizers in without the list of all its models.

It reads some 3,300 of its own files for that list, twice: a third of what a head takes to start, and more where they are not in
the system's cache.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from mlx_ring.core.bare_package import import_bare


def import_tokenizers() -> None:
    """Have `AutoTokenizer` in `transformers`. Call it before that is imported; all else of it comes in whole when it is asked for."""
    if "transformers" in sys.modules:
        return
    try:
        _import_bare()
    except (ImportError, AttributeError):
        # A version that is made otherwise: whoever imports it next has it whole.
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def _import_bare() -> None:
    import_bare("transformers")
    import_bare("transformers.models")
    package = sys.modules["transformers"]
    # Its modules ask for that at once, before the rest could come in.
    package.__dict__["__version__"] = version("transformers")
    from transformers.models.auto.tokenization_auto import AutoTokenizer  # noqa: PLC0415 - only now without the rest
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast  # noqa: PLC0415 - the same

    package.__dict__.update(AutoTokenizer=AutoTokenizer, PreTrainedTokenizerFast=PreTrainedTokenizerFast)
