"""Who gets the page, and who gets JSON: both live at `/`."""

from __future__ import annotations

_HTML, _JSON = "text/html", "application/json"


def wants_page(accept: str | None) -> bool:
    """Whether a client asks for HTML by name, and does not like JSON better. `*/*` alone, as curl sends, does not."""
    liking = dict(_read(accept or ""))
    html = liking.get(_HTML, 0.0)
    return html > 0 and html >= liking.get(_JSON, 0.0)


def _read(accept: str) -> list[tuple[str, float]]:
    """Each kind with its weight."""
    return [_weighed(part) for part in accept.split(",")]


def _weighed(part: str) -> tuple[str, float]:
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weights = [
        value for name, _, value in (each.partition("=") for each in parameters) if name.strip() == "q"
    ]
    return kind, _number(weights[0]) if weights else 1.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
