"""Write the Grafana dashboard docs/grafana/mlx-ring.json, or check it with `--check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from dashboard_panels import ROWS, Panel, Query

PAGE = Path(__file__).resolve().parent.parent / "docs" / "grafana" / "mlx-ring.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24

Json = dict[str, object]


def dashboard() -> Json:
    """Return the dashboard; Grafana asks for the data source on import."""
    return {
        "title": "mlx-ring",
        "uid": "mlx-ring",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "tags": ["mlx-ring", "llm"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": list(variables())},
        "panels": list(panels()),
    }


def variables() -> Iterable[Json]:
    """Yield the variables at the top."""
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, label, query in (
        ("job", "Job", "label_values(mlx_ring_build_info, job)"),
        ("model", "Model", "label_values(mlx_ring_num_requests_running, model_name)"),
        (
            "instance",
            "Instance",
            'label_values(mlx_ring_num_requests_running{model_name=~"$model"}, instance)',
        ),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def panels() -> Iterable[Json]:
    """Yield rows of panels, from left to right and from top to bottom."""
    ids, y = count(1), 0
    for title, row in ROWS:
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        y, x, lowest = y + 1, 0, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y, lowest = 0, y + lowest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield render_panel(panel, next(ids), place)
            x, lowest = x + panel.width, max(lowest, panel.height)
        y += lowest


def render_panel(panel: Panel, number: int, place: Mapping[str, int]) -> Json:
    custom: Json = (
        {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    )
    defaults: Json = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if panel.kind == "timeseries"
        else {},
        "targets": list(targets(panel.queries, instant=panel.kind == "table")),
    }


def targets(queries: Sequence[Query], *, instant: bool) -> Iterable[Json]:
    for number, (query, legend) in enumerate(queries):
        target: Json = {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
        }
        yield target | ({"instant": True, "format": "table"} if instant else {})


def main() -> None:
    """Write or check the dashboard."""
    fresh = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != fresh:
            sys.exit(f"{PAGE.name} is out of date. Run `make docs`.")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
