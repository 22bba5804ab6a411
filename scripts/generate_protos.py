"""Generate Python code from src/mlx_ring/rpc/protos/*.proto, or check that it is up to date.

`python scripts/generate_protos.py` writes the code next to the protos. With `--check` it
generates into a temporary folder, compares, and exits with 1 if anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent.parent / "src"
PROTOS = SOURCES / "mlx_ring" / "rpc" / "protos"


def generate(target: Path) -> None:
    """Write `*_pb2.py` and `*_pb2.pyi` under `target`, laid out as under `src`."""
    well_known = str(files("grpc_tools").joinpath("_proto"))
    protos = [str(path) for path in sorted(PROTOS.glob("*.proto"))]
    arguments = ["protoc", f"-I{SOURCES}", f"-I{well_known}", f"--python_out={target}", f"--pyi_out={target}"]
    if protoc.main([*arguments, *protos]) != 0:
        sys.exit("protoc failed; see its message above.")


def stale_files() -> list[str]:
    """List the generated files that differ from the protos, including missing and left-over ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in Path(folder).rglob("*_pb2.py*")}
    kept = {path.name: path.read_bytes() for path in PROTOS.glob("*_pb2.py*")}
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


def main() -> None:
    """Write or check the generated code."""
    if sys.argv[1:] == ["--check"]:
        if names := stale_files():
            sys.exit(f"Out of date: {', '.join(names)}. Run `make protos`.")
        return
    generate(SOURCES)


if __name__ == "__main__":
    main()
