"""The commands as a person types them: an error is one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import run_cli, run_in_process

from mlx_ring.settings.config import Settings
from mlx_ring.settings.fields import flag_name, flag_of

COMMANDS = [
    "serve",
    "join",
    "chat",
    "plan",
    "profile",
    "bench",
    "heads",
    "doctor",
    "models",
    "token",
    "node",
    "service",
]


def complaint(*arguments: str, folder: Path, **environment: str) -> str:
    """Return the one sentence with which a command refuses its input, in this process."""
    return sentence_of(run_in_process(*arguments, folder=folder, environment=environment))


def sentence_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence, log lines aside, that a command prints on stderr when it fails with exit code 2."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if " process=" not in line]
    assert line.startswith("mlx-ring: ")
    return line.removeprefix("mlx-ring: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--port", "http"], "--port is http; it must be a whole number from 0 to 65535."),
        (["serve", "--stages", "-1"], "--stages is -1; it must be a whole number from 1 to 1024."),
        (["serve", "--config", "none.yaml"], "The settings file none.yaml does not exist."),
        (["serve", "--nope"], "No such option: --nope"),
        (["ps", "--xyz"], "No such option: --xyz. `mlx-ring ps --help` lists the arguments and options."),
        (["models", "nope"], "No such command 'nope'. `mlx-ring models --help` lists the commands."),
        (
            ["serve", "--host", "a.invalid"],
            "--host is a.invalid, which is not a valid address: ",
        ),
        (
            ["cluster", "start", "-c", "none.json"],
            "--config is none.json, which cannot be read: No such file",
        ),
        (["serve", "--stage", "2"], "No such option: --stage (Possible options: --stages, "),
        (["serve", "demo", "b", "--more-models", "c"], "--more-models is c, and b was given too"),
        (["serve", "--no-prefix-cache", "--prefix-cache", "on"], "--prefix-cache is on, but another flag"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    sentence = complaint(*arguments, folder=tmp_path)
    assert sentence.startswith(said)
    assert "[Errno" not in sentence


REFUSED = [
    (["serve", "demo", "demo"], "The model demo was named twice"),
    (["serve", "a", "b"], "There is no model 'a'"),
    (["serve", "--enable-prefix-caching", "./nowhere"], "There is no model './nowhere'"),
    (["serve", __file__, "--port", "0"], f"{__file__} is no folder: give a model's folder, or a GGUF file"),
    (["sevre"], "No such command 'sevre'. Did you mean 'serve'"),
    (["plan", "./nowhere", "--machine", "m4-mac-mini-16"], "There is no model './nowhere'"),
    (["doctor", "a b"], "'a b' is no address of a head"),
    (["models", "preshard", "demo", "--out", "shards"], "Give exactly one of --stages, --layers and --plan"),
    (["node", "remove", "mini"], "There is no node 'mini': no machine has joined this cluster."),
    (["node", "readmit", "mini"], "There is no node 'mini': no machine has joined this cluster."),
    (["token", "create", "--uses", "0"], "--uses is 0;"),
]
"""Arguments of commands that refuse their input after they have read their settings."""
REFUSED_BY_A_PROCESS = [
    (["serve", "./nowhere"], "There is no model './nowhere'"),
    (["chat", "a", "b", "c"], "Got unexpected extra argument(s) (c)."),
    (["profile", "--blas", "mkl"], "--blas is mkl; it must be auto, openblas or off."),
]
"""The same for an asynchronous command, for the parser of arguments, and for a setting."""


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_each_command_reports_invalid_input(arguments: list[str], said: str, tmp_path: Path) -> None:
    environment = {"MLX_RING_STATE_DIR": str(tmp_path / "state"), "MLX_RING_PORT": "0"}
    assert complaint(*arguments, folder=tmp_path, **environment).startswith(said)


@pytest.mark.parametrize(("arguments", "said"), REFUSED_BY_A_PROCESS)
def test_a_process_of_its_own_reports_invalid_input(arguments: list[str], said: str, tmp_path: Path) -> None:
    environment = {"MLX_RING_STATE_DIR": str(tmp_path / "state"), "MLX_RING_PORT": "0"}
    assert sentence_of(run_cli(*arguments, folder=tmp_path, environment=environment)).startswith(said)


def test_a_misspelt_built_in_model_gets_a_suggestion(tmp_path: Path) -> None:
    said = complaint("serve", "demmo", "--port", "0", folder=tmp_path)
    assert said.startswith("There is no model 'demmo'")
    assert "Did you mean 'demo'?" in said


def test_a_busy_port_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = complaint("serve", "./nowhere", "--port", str(port), folder=tmp_path)
    assert said.startswith(f"Port {port} on 127.0.0.1 is in use by another process")
    assert "`mlx-ring ps` lists" in said


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    said = complaint("serve", "--host", "192.0.2.1", folder=tmp_path)
    assert said.startswith("--host is 192.0.2.1, which is no address of this machine: give one that it has")


def test_a_bad_variable_in_the_environment_is_named(tmp_path: Path) -> None:
    assert complaint("serve", folder=tmp_path, MLX_RING_STAGES="two").startswith("MLX_RING_STAGES is two;")


def test_more_stages_than_layers_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = run_cli("serve", str(tiny_model), "--stages", "6", "--port", "0", folder=tmp_path)
    assert sentence_of(done).startswith("6 stages were requested, but the model has 5 layers")


def test_a_context_longer_than_the_model_s_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    said = complaint("serve", str(tiny_model), "--max-model-len", "5000", "--port", "0", folder=tmp_path)
    assert said.startswith("--max-model-len is 5000;")


def test_a_context_that_exceeds_the_kv_cache_memory_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--max-model-len", "4096", "--kv-cache-memory", "1MiB")
    said = sentence_of(run_cli("serve", str(tiny_model), "--port", "0", *options, folder=tmp_path))
    assert said.startswith("The KV cache of stage 0 may take 1 MB")
    assert "Give --max-model-len" in said


@pytest.mark.parametrize("fault", ["empty", "no weights", "truncated", "no tokenizer", "code"])
def test_an_unusable_model_folder_is_refused_with_the_reason(
    fault: str, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    canary = tmp_path / "canary"
    match fault:
        case "empty":
            shutil.rmtree(broken)
            broken.mkdir()
            expected = "config.json"
        case "no weights":
            (broken / "model.safetensors").unlink()
            expected = "has no weights"
        case "truncated":
            weights = broken / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:1000])
            expected = "truncated"
        case "no tokenizer":
            (broken / "tokenizer.json").unlink()
            (broken / "tokenizer_config.json").unlink()
            expected = "tokenizer"
        case _:
            config = json.loads((broken / "config.json").read_text())
            (broken / "config.json").write_text(json.dumps(config | {"model_file": "mine.py"}))
            (broken / "mine.py").write_text(f"open({str(canary)!r}, 'w')")
            expected = "never run"
    assert expected in complaint("serve", str(broken), "--port", "0", folder=tmp_path)
    assert not canary.exists()


def test_a_hub_id_without_network_says_what_to_do(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run_cli("serve", "Qwen/Qwen3-0.6B", "--port", "0", folder=tmp_path, environment=environment)
    said = sentence_of(done)
    assert said.startswith("Qwen/Qwen3-0.6B is not on this machine and cannot be fetched")
    assert "mlx-ring models list" in said


def test_ctrl_c_during_imports_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    # The signal arrives at the first import of the commands. Tests that run in the background ignore it otherwise.
    code = (
        "import sys, signal; from mlx_ring.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mlx_ring.cli.app': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt()); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_the_version_is_one_line(tmp_path: Path) -> None:
    done = run_cli("--version", folder=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "mlx-ring")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (words.split(), "set HOME, or MLX_RING_STATE_DIR")
            for words in ("ps", "doctor", "stop", "token list")
        ),
        (["pull", "someone/tiny"], "set HF_HOME"),
        (["rm", "someone/tiny"], "set HF_HOME"),
        (["service", "show"], "set HOME, or run `mlx-ring service` as a user with an account"),
    ],
)
def test_a_refusal_of_a_user_without_a_home_says_what_to_set(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", without_home)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~nobody-has-this-name/hub")
    environment = {} if "STATE_DIR" in said else {"MLX_RING_STATE_DIR": str(tmp_path / "state")}
    sentence = complaint(*arguments, folder=tmp_path, **environment)
    assert sentence.startswith("This user has no home folder for ")
    assert said in sentence


def test_a_service_of_a_user_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert "has no name on this machine" in complaint(
        "service", "show", "--", "serve", "demo", folder=tmp_path
    )


def test_help_lists_every_command(tmp_path: Path) -> None:
    done = run_in_process("--help", folder=tmp_path, environment={"COLUMNS": "200"})
    assert done.returncode == 0
    assert [name for name in COMMANDS if f" {name} " not in done.stdout] == []


def test_help_lists_basic_flags_and_help_all_every_flag(tmp_path: Path) -> None:
    names = {name for name in Settings.model_fields if name != "model"}
    basic = {name for name in names if flag_of(Settings.model_fields[name]).basic}
    assert _listed(names, "--help", tmp_path) == basic
    assert _listed(names, "--help-all", tmp_path) == names


def _listed(names: set[str], flag: str, folder: Path) -> set[str]:
    """Return the settings whose flags `mlx-ring serve` lists."""
    text = run_in_process("serve", flag, folder=folder, environment={"COLUMNS": "200"}).stdout
    flags = set(re.findall(r"--[a-z-]+", text))
    return {name for name in names if flag_name(name) in flags}


def test_models_list_shows_built_in_models_with_their_architecture(tmp_path: Path) -> None:
    done = run_in_process("models", "list", folder=tmp_path)
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert rows["demo"][1:3] == ["built-in", "qwen3"]
    assert rows["demo-moe"][1:3] == ["built-in", "qwen3_moe"]
