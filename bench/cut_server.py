"""Run `mlx-ring serve` with a given number of layers per stage: `python cut_server.py 3,9 serve MODEL --stages 2 ...`."""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise

from mlx_ring.cli.main import main
from mlx_ring.core.types import LayerRange
from mlx_ring.head import placing

counts = [int(count) for count in sys.argv.pop(1).split(",")]
ranges = tuple(LayerRange(*ends) for ends in pairwise(accumulate(counts, initial=0)))
placing.cut_layers = lambda _folder, _settings: ranges
main()
