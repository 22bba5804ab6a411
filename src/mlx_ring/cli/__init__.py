"""What a person types: a thin shell over the rest."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells: 128 and the number of SIGINT."""
