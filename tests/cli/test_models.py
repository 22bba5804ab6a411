"""`mlx-ring models preshard` and `recommend` as a person types them, and the progress of downloads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from rich.cells import cell_len
from tests.api.clients import serving as api_server
from tests.api.twins import TwinService
from tests.cli.test_main import complaint
from tests.default_settings import make_api_settings
from tests.processes import run_in_process
from tests.profiles import RATES, made_up_profile

from mlx_ring.cli import DownloadBar, local_models
from mlx_ring.cli.local_models import memory_here, recommend
from mlx_ring.cli.models import parse_layers
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import LayerRange
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.running import Running
from mlx_ring.models.model_folder import PullProgress, read_model_folder
from mlx_ring.models.model_source import LocalModel, find_model
from mlx_ring.worker.weights import load_stage


def logits(folders: list[tuple[Path, LayerRange]]) -> mx.array:
    hidden: mx.array | None = None
    for path, layers in folders:
        stage = load_stage(read_model_folder(path), layers, "float32", lambda _done, _total: None)
        hidden = stage.forward(mx.array([[3, 1, 4]]), hidden, stage.make_layer_caches(), None)
    assert hidden is not None
    return hidden


@pytest.mark.parametrize(
    "options", [("--layers", "0-2,2-5"), ("--stages", "2"), ("--layers", "0-1,1-2,2-5")], ids=" ".join
)
def test_stages_loaded_from_their_folders_compute_the_model_s_logits(
    tiny_model: Path, tmp_path: Path, options: tuple[str, str]
) -> None:
    done = run_in_process("models", "preshard", str(tiny_model), *options, "--out", "shards", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "shards").iterdir())
    rows = [
        re.fullmatch(r"(.+): layers (\d+)-(\d+), [\d,]+ bytes", line) for line in done.stdout.splitlines()
    ]
    assert [row and Path(row[1]) for row in rows] == folders
    ranges = [LayerRange(int(row[2]), int(row[3])) for row in rows if row]
    whole: Any = load_model(tiny_model)[0]
    assert mx.array_equal(logits(list(zip(folders, ranges, strict=True))), whole(mx.array([[3, 1, 4]])))


def test_a_saved_plan_assigns_each_folder_to_a_machine(tmp_path: Path) -> None:
    machines = ("--machine", "m4-mac-mini-16", "--machine", "m2-max-mac-studio-64")
    options = (*machines, "--strategy", "custom", "--layers", "3,5", "--json")
    written = run_in_process("plan", "demo", *options, folder=tmp_path)
    (tmp_path / "plan.json").write_text(written.stdout)
    done = run_in_process(
        "models", "preshard", "demo", "--plan", "plan.json", "--out", "shards", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stage-0 is for m4-mac-mini-16\nstage-1 is for m2-max-mac-studio-64\n")
    assert "layers 0-3" in done.stdout
    assert "layers 3-8" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "which cannot be read"),
        ('{"replicas": []}', "is not a plan of one replica"),
        (
            '{"stages": [{"node": "a", "layers": {"start": 0, "end": 7}}]}',
            "do not cover the model's 8 layers",
        ),
        (
            '{"stages": [{"node": "a", "layers": {"start": 0, "end": 8}, "ranks": [{}, {}]}]}',
            "in which 2 machines share layers 0 to 7",
        ),
    ],
)
def test_an_invalid_plan_is_refused_in_one_sentence(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    options = ("--plan", "plan.json", "--out", "shards")
    assert said in complaint("models", "preshard", "demo", *options, folder=tmp_path)


@pytest.mark.skipif(shutil.which("tar") is None, reason="tar copies the folder")
def test_a_copy_by_tar_stays_sparse_and_loads(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--layers", "0-4,4-5", "--out", "shards")
    assert run_in_process("models", "preshard", str(tiny_model), *options, folder=tmp_path).returncode == 0
    (tmp_path / "there").mkdir()
    packed = subprocess.run(
        ["tar", "--create", "--sparse", "--directory", str(tmp_path / "shards"), "stage-1"],
        check=True,
        capture_output=True,
    ).stdout
    subprocess.run(["tar", "--extract", "--directory", str(tmp_path / "there")], input=packed, check=True)
    stage = tmp_path / "there" / "stage-1"
    size = (stage / "model.safetensors").stat().st_size
    assert (stage / "model.safetensors").stat().st_blocks * 512 < size
    assert len(packed) < size
    load_stage(read_model_folder(stage), LayerRange(4, 5), "float32", lambda _done, _total: None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Give exactly one of --stages, --layers and --plan"),
        (("--stages", "6"), "6 stages were requested, but the model has 5 layers"),
        (("--stages", "two"), "--stages is two"),
        (("--layers", "0-2,3-5"), "--layers is 0-2,3-5; it must be ranges that cover the model's 5 layers"),
    ],
)
def test_impossible_stages_are_refused_in_one_sentence(
    tiny_model: Path, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    said = complaint("models", "preshard", str(tiny_model), "--out", "shards", *options, folder=tmp_path)
    assert sentence in said
    assert not (tmp_path / "shards").exists()


def test_no_stage_is_written_if_one_already_exists(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "shards" / "stage-1").mkdir(parents=True)
    options = ("--layers", "0-2,2-5", "--out", "shards")
    said = complaint("models", "preshard", str(tiny_model), *options, folder=tmp_path)
    assert "stage-1 already exists: remove it" in said
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["stage-1"]


@pytest.mark.parametrize(
    "text",
    ["0-2,2-6", "0-2,2-2,2-5", "2-5", "0-4", "0-2;2-5", "", "0-5,", "-5", "5-0", "0-3,2-5", "0-9999999"],
)
def test_layer_ranges_with_gaps_or_overlaps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cover the model's 5 layers in order.* such as 0-2,2-5"):
        parse_layers(text, 5)


def test_layer_ranges_exclude_their_ends() -> None:
    assert parse_layers("0-2, 2-5", 5) == (LayerRange(0, 2), LayerRange(2, 5))


def test_only_models_at_a_pleasant_predicted_speed_are_recommended(tmp_path: Path) -> None:
    fast = run_in_process("recommend", "--machine", "m4-mac-mini-16", "--json", folder=tmp_path)
    found = json.loads(fast.stdout)
    assert "qwen3:0.6b" in {each["name"] for each in found}
    assert all(each["fits"] and each["tokens_per_s"] >= 5 for each in found)
    abilities = {each["name"]: each["abilities"] for each in found}
    assert (abilities["llama3.1:8b"], abilities["qwen3:0.6b"]) == (["tools"], ["tools", "reasoning"])
    slow = "machines: [{name: slow, memory_gb: 16, bandwidth_gb_s: 0.1, tflops: 0.01}]"
    (tmp_path / "slow.yaml").write_text(slow)
    none = run_in_process("models", "recommend", "--cluster", "slow.yaml", folder=tmp_path)
    assert none.stdout.startswith("None: no listed model is predicted at 5 tokens/s or more on slow.")
    assert none.stderr.startswith("slow is described by numbers, and predicted like the nearest chip, ")


def test_a_recommendation_has_the_first_token_of_a_prompt_that_fills_the_context(tmp_path: Path) -> None:
    machine = ("--machine", "m4-mac-mini-16")
    found = json.loads(run_in_process("recommend", *machine, "--json", folder=tmp_path).stdout)
    asked = run_in_process("plan", "--what-fits", *machine, "--json", folder=tmp_path)
    planned = {one["model"]: one for one in json.loads(asked.stdout)["outcomes"]}
    assert found
    for each in found:
        same = planned[each["model"]]
        assert (each["prompt_tokens"], each["answer_tokens"]) == (8192 - 256, 256)
        assert each["first_token_s_range"] == same["first_token_s_range"]
    shown = run_in_process("recommend", *machine, folder=tmp_path).stdout
    assert next(line.split()[2:5] for line in shown.splitlines() if line.startswith("model ")) == [
        "at",
        "8k,",
        "s",
    ]
    (row,) = [line for line in shown.splitlines() if line.startswith("qwen3:0.6b ")]
    assert row.rstrip().endswith("tools, reasoning")


def test_recommendations_for_a_large_machine_fit_into_80_columns(tmp_path: Path) -> None:
    shown = run_in_process("recommend", "--machine", "m3-ultra-512", folder=tmp_path).stdout
    lines = shown.splitlines()
    assert any(line.startswith("qwen3:235b-a22b-8bit ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_recommendation_says_what_it_could_not_ask_and_that_the_machine_was_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def busy() -> MachineProfile:
        return made_up_profile(rates=(RATES[0].model_copy(update={"spread": 0.9}), *RATES[1:]))

    with api_server(TwinService(), make_api_settings(api_keys=("k",))) as url:
        monkeypatch.setattr(local_models, "heads_here", lambda: [Running("head", 4711, 0.0, "", url)])  # pyright: ignore[reportUnknownLambdaType]
        monkeypatch.setattr(local_models, "_own_profile", busy)
        recommend()
        said = capsys.readouterr()
        assert memory_here() is None, "a cluster that cannot be asked may be of any size"
        assert memory_here("k") is not None
    assert (
        "asks for an API key: give it with --api-key, or set MLX_RING_API_KEY. These predictions are for"
        in said.err
    )
    assert "The machine was busy when it was measured" in said.err
    assert "this machine" in said.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--link", "wifi"], "--link is wifi, but no machine is added; give --machine."),
        (
            ["--machine", "m4-mac-mini-16", "--url", "http://here"],
            "--url is http://here, but machines are given too; leave one of them out.",
        ),
        (["--machine", "m4-mac-mini-16", "--api-key", "k"], "--api-key is given, but no head is asked;"),
    ],
)
def test_a_recommendation_ignores_no_flag(flags: list[str], said: str, tmp_path: Path) -> None:
    refused = run_in_process("recommend", *flags, folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"mlx-ring: {said}")


def test_the_list_of_models_can_be_read_by_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_models, "interrupted_downloads", lambda: {"org/new": 7})
    listed = {
        each["name"]: each for each in json.loads(run_in_process("list", "--json", folder=tmp_path).stdout)
    }
    assert listed["demo"]["from"] == "built-in"
    assert listed["demo"]["layers"] == find_model("demo").folder.num_layers
    assert Path(listed["demo"]["path"]).is_dir()
    assert listed["org/new"] == {
        "name": "org/new",
        "short_names": [],
        "from": "hub",
        "kind": "incomplete",
        "bytes": 7,
    }


@pytest.mark.parametrize("command", ["pull", "run", "rm"])
def test_an_empty_name_is_not_the_working_folder(command: str, tmp_path: Path) -> None:
    refused = run_in_process(command, "", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("mlx-ring: There is no model ''.")
    assert str(tmp_path) not in refused.stderr


def test_a_narrow_terminal_breaks_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/models/[bold]some/Qwen3-30B-A3B-Instruct-2507-4bit-DWQ.gguf"
    known = LocalModel(name, "file", find_model("demo").folder)
    monkeypatch.setattr(local_models, "list_local_models", lambda: [known])
    listed = run_in_process("list", folder=tmp_path, environment={"COLUMNS": "40"})
    (row,) = [line for line in listed.stdout.splitlines() if line.startswith(name)]
    assert row.split()[-1] == "32,768"
    planned = run_in_process(
        "recommend", "--machine", "m4-mac-mini-16", folder=tmp_path, environment={"COLUMNS": "40"}
    )
    assert "\nllama3.2:3b-8bit " in planned.stdout


def test_tables_are_cut_by_no_narrow_terminal(tmp_path: Path) -> None:
    with api_server(TwinService()) as url:
        for command in (
            ("cluster", "status", "--url", url),
            ("plan", "demo", "--machine", "m4-mac-mini-16", "--machine", "m2-max-mac-studio-64"),
        ):
            narrow, usual = (
                run_in_process(*command, folder=tmp_path, environment={"COLUMNS": columns}).stdout
                for columns in ("40", "80")
            )
            assert narrow == usual
            assert "…" not in usual


LONG_NAME = "mlx-community/Llama-3.3-70B-Instruct-4bit-DWQ"


@pytest.mark.parametrize(("columns", "shown"), [(40, ("23.4/39.7 GB",)), (80, ("23.4/39.7 GB", "━", "-DWQ"))])
def test_a_long_name_leaves_room_for_the_figures_of_a_download(
    columns: int, shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
        monkeypatch.setenv(name, value)
    with DownloadBar(LONG_NAME) as bar:
        bar.report(PullProgress("downloading", 23_400_000_000, 39_700_000_000))
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    assert max(map(len, frames)) <= columns
    assert any(all(each in frame for each in shown) for frame in frames), frames


def test_a_long_name_of_wide_characters_leaves_room_for_the_figures_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with DownloadBar("模型" * 20) as bar:
        bar.report(PullProgress("downloading", 23_400_000_000, 39_700_000_000))
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    assert max(map(cell_len, frames)) <= 80
    assert any("模型" in frame and "23.4/39.7 GB" in frame for frame in frames), frames


def test_lines_of_a_download_are_ten_seconds_apart_and_at_most_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("mlx_ring.cli.time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def lines_after(seconds: float, status: Literal["downloading", "verifying"], percent: int) -> int:
        clock.now_s += seconds
        bar.report(PullProgress(status, percent * 45_000_000, 4_500_000_000))
        return len(capsys.readouterr().err.splitlines())

    with DownloadBar("qwen3:8b") as bar:
        assert lines_after(0, "downloading", 0) == 1
        assert lines_after(9, "downloading", 50) == 0
        assert lines_after(2, "downloading", 51) == 1
        assert lines_after(0, "verifying", 51) == 1
        for _ in range(40):
            assert lines_after(0.1, "downloading", 70) + lines_after(0.1, "verifying", 70) == 0
        assert lines_after(40, "downloading", 60) == 0
        assert lines_after(20, "downloading", 60) == 1


def test_a_download_without_a_terminal_says_where_it_is_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_ring.cli._LINE_S", 0.0)
    with DownloadBar("qwen3:8b") as bar:
        for percent in range(101):
            bar.report(PullProgress("downloading", percent * 45_000_000, 4_500_000_000))
        for percent in range(99, 101):
            bar.report(PullProgress("verifying", percent * 45_000_000, 4_500_000_000))
        bar.report(PullProgress("done", 4_500_000_000, 4_500_000_000))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "downloading qwen3:8b: 0% of 4,500 MB"
    assert lines[-1] == "verifying qwen3:8b: 99% of 4,500 MB"
    assert 10 <= len(lines) <= 12
