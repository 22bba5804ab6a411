"""Import path for the scripts of the demo models, which import each other by their own names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "demo_models"))
