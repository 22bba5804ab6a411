"""What cannot be tried on this machine at all is not collected, and the run's first lines say so."""

from __future__ import annotations

from tests.other_python import other_python

collect_ignore = [] if other_python() else ["test_cluster_other_python.py"]


def pytest_report_header() -> list[str]:
    return [f"{name}: not run, for this machine has no second Python from 3.11 on" for name in collect_ignore]
