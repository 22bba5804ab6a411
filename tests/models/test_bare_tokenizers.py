"""Tokenizers without the rest of transformers, each in a process of its own: what is imported stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.processes import clean_environment
from tokenizers import Tokenizer

START = """
import sys
from mlx_ring.models import lean_imports as bare_tokenizers
bare_tokenizers.import_tokenizers()
from transformers import AutoTokenizer
def load():
    return AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
def all_is_listed():
    return type(sys.modules["transformers"]).__name__ == "_LazyModule"
"""


def said(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + code, str(folder)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ids(folder: Path) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Hi").ids


def test_a_tokenizer_is_loaded_without_a_list_of_all_models(tiny_model: Path) -> None:
    assert said("print(load().encode('Hi'), all_is_listed())", tiny_model) == f"{ids(tiny_model)} False"


def test_all_else_is_there_when_it_is_asked_for(tiny_model: Path) -> None:
    code = """
import transformers
print(transformers.GPT2Config().model_type, transformers.BertConfig().model_type, all_is_listed())
from transformers import LlamaConfig
print(LlamaConfig().model_type, isinstance(load(), transformers.PreTrainedTokenizerBase))
"""
    assert said(code, tiny_model).split() == ["gpt2", "bert", "True", "llama", "True"]


def test_a_tokenizer_of_a_class_that_nobody_knows_is_loaded_too(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NobodysTokenizerFast"}))
    assert said("print(load().encode('Hi'))", tmp_path) == str(ids(tiny_model))


def test_a_transformers_that_is_made_otherwise_comes_in_whole(tiny_model: Path) -> None:
    code = """
for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
def fail(name):
    raise ImportError(name)
bare_tokenizers.version = fail
bare_tokenizers.import_tokenizers()
from transformers import AutoTokenizer
print(load().encode('Hi'), all_is_listed())
"""
    assert said(code, tiny_model) == f"{ids(tiny_model)} True"
