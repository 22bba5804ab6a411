"""Stop strings in a stream of text, where one may span several tokens."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text on until a stop string is complete; what could still become one is held back.

    The string that is complete first wins, and of several that end together the longest:
    so the outcome does not hang on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string that ends it, if one does."""
        if not self._stops:
            return text, None
        text = self._held + text
        self._held = ""
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            return text[:start], stop
        held = self._open_prefix(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _open_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
