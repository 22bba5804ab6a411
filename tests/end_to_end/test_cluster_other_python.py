"""`mlx-ring cluster start` for a machine with only another Python and no access to the package index."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.namespaces import lan, skip_without_namespaces
from tests.other_python import FOLDERS, OWN, other_python
from tests.processes import MLX_RING
from tests.ssh_hosts import SshHost, skip_without_sshd, ssh_hosts

from mlx_cpu_kernels.build import COMPILERS
from mlx_ring.cluster.lifecycle.programs import wanted_here
from mlx_ring.cluster.lifecycle.wheels import WheelStore, packages_for
from mlx_ring.core.folders import packages_folder

pytestmark = pytest.mark.machines


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[list[SshHost]]:
    """Run an sshd on two hosts. The last has no Python of this version, and no compiler."""
    skip_without_namespaces()
    skip_without_sshd()
    hidden = {path.resolve() for folder in FOLDERS if (path := Path(folder, OWN)).exists()}
    hidden |= {Path(path).resolve() for name in COMPILERS if (path := shutil.which(name))}
    with ExitStack() as stack:
        made = stack.enter_context(ssh_hosts(stack.enter_context(lan(2)), tmp_path, sorted(hidden)))
        yield made
    for host in made:
        shutil.rmtree(host.home)


@pytest.mark.timeout(600)
def test_machine_with_another_python_gets_packages_for_it_and_serves(
    hosts: list[SshHost], tmp_path: Path
) -> None:
    first, second = hosts
    python = other_python()
    assert python is not None
    managed = second.home / ".local" / "share" / "uv" / "python"
    managed.mkdir(parents=True)
    (managed / "other").symlink_to(Path(python.path).parent.parent)
    # Neither host reaches an index. The first has fetched the packages before.
    packages_for(python, wanted_here(), WheelStore(packages_folder(first.state)))
    (tmp_path / "cluster.json").write_text(
        json.dumps(
            {
                "devices": [{"device_id": "second", "hostname": second.host.address}],
                "model": "demo",
                "serve": {"max-model-len": 64},
            }
        )
    )

    def cluster(verb: str) -> subprocess.CompletedProcess[str]:
        return first.run(*MLX_RING, "cluster", verb, "-c", str(tmp_path / "cluster.json"), folder=first.home)

    started = cluster("start")
    assert "Serving demo" in started.stdout, started.stdout + started.stderr
    assert f"second: fetching packages for {python}" in started.stderr
    programs = {psutil.Process(pid).cmdline()[0] for pid in second.processes()}
    assert str(second.home / ".local/share/mlx-ring/env/bin/python") in programs
    environment = (second.home / ".local/share/mlx-ring/env/pyvenv.cfg").read_text()
    assert f"version = {python.version}." in environment
    logs = "".join(path.read_text() for path in second.state.rglob("*.log"))
    assert logs.count("no C++ compiler was found") == 1, logs
    assert cluster("stop").returncode == 0
