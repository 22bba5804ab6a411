"""Imports of single modules without their package, each in its own process, because imported modules stay."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.processes import clean_environment
from tokenizers import Tokenizer

from mlx_ring.core.lean_imports import UNUSED

BARE = "import sys; from mlx_ring.core.lean_imports import import_bare; import_bare('heavy'); "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a package that prints when its `__init__` runs, and has a module."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(
        "print('init')\nfrom heavy.light import two\nthree = two + 1\n"
    )
    (tmp_path / "heavy" / "light.py").write_text("two = 2\n")
    return tmp_path


def output_of(folder: Path, code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_module_is_imported_without_its_packages_init(folder: Path) -> None:
    assert output_of(folder, BARE + "from heavy.light import two; print(two)") == ["2"]


@pytest.mark.parametrize(
    "access", ["from heavy import three; print(three)", "import heavy; print(heavy.three); heavy.three"]
)
def test_access_to_the_package_itself_runs_its_init_once(folder: Path, access: str) -> None:
    assert output_of(folder, BARE + "import heavy.light; " + access) == ["init", "3"]


def test_what_was_imported_is_left_out_of_garbage_collections(folder: Path) -> None:
    code = """
import gc
from mlx_ring.core.lean_imports import importing
for _ in range(2):
    before = gc.get_freeze_count()
    with importing():
        import heavy
    print(gc.get_freeze_count() > before, gc.isenabled())
"""
    assert output_of(folder, code) == ["init", "True", "True", "False", "True"]


def test_what_an_instance_left_is_collected_and_before_the_first_one_there_is_no_search(folder: Path) -> None:
    code = """
import gc
from mlx_ring.core.lean_imports import collect_left, left_out
searches = []
gc.callbacks.append(lambda phase, found: searches.append((phase, found["generation"])))
collect_left()
print(("start", 2) in searches)
left = [type("Left", (), {"__del__": lambda _: print("collected")})()]
left.append(left)
with left_out(is_quick=False):
    del left
    gc.collect()
    collect_left()
    print("serves")
gc.collect()
print("left")
collect_left()
"""
    assert output_of(folder, code) == ["False", "serves", "left", "collected"]


def test_what_ended_beside_an_instance_that_serves_is_collected(folder: Path) -> None:
    code = """
import gc
from mlx_ring.core.lean_imports import collect_left, left_out
with left_out(is_quick=False):
    left = [type("Left", (), {"__del__": lambda _: print("collected")})()]
    left.append(left)
    with left_out(is_quick=False):
        pass
    del left
    gc.collect()
    print("serves")
    # Another one that recovers also serves.
    with left_out(is_quick=True):
        frozen = gc.get_freeze_count()
    collect_left()
    print(gc.get_freeze_count() == frozen > 0)
with left_out(is_quick=True):
    collect_left()
    print(gc.get_freeze_count() > 0)
collect_left()
print(gc.get_freeze_count())
"""
    assert output_of(folder, code) == ["collected", "serves", "True", "True", "0"]


def test_imports_in_other_threads_leave_the_collector_as_it_is(folder: Path) -> None:
    code = """
import gc, threading
from mlx_ring.core.lean_imports import importing
def load():
    before = gc.get_freeze_count()
    with importing():
        import heavy
        print(gc.isenabled())
    print(gc.get_freeze_count() == before)
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""
    assert output_of(folder, code) == ["init", "True", "True"]


def test_mlx_lm_is_imported_under_a_low_limit_of_open_files_which_stays(tmp_path: Path) -> None:
    """Allow fewer open files than mlx-lm asks for, which would keep workers from starting."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
change = resource.setrlimit
from mlx_ring.core.lean_imports import import_mlx_lm
import_mlx_lm()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit is change)
"""
    assert output_of(tmp_path, code) == ["512", "1024", "True"]


def test_an_attribute_that_the_package_lacks_is_missing(folder: Path) -> None:
    code = BARE + "import heavy; print(hasattr(heavy, 'four'), hasattr(heavy, 'four'))"
    assert output_of(folder, code) == ["init", "False", "False"]


def test_an_imported_or_missing_package_is_left_as_it_is(folder: Path) -> None:
    assert output_of(folder, "import heavy; " + BARE + "print(heavy.three)") == ["init", "3"]
    code = "from mlx_ring.core.lean_imports import import_bare; import_bare('no_such_package'); import sys; "
    assert output_of(folder, code + "print('no_such_package' in sys.modules)") == ["False"]


@pytest.mark.parametrize("package", ["mlx-lm", "transformers", "protobuf"])
def test_the_versions_with_a_known_structure_are_declared(package: str) -> None:
    required = [Requirement(each) for each in requires("mlx-ring") or ()]
    (specifier,) = [each.specifier for each in required if each.name == package]
    assert {"<", ">="} == {each.operator for each in specifier}
    assert specifier.contains(version(package))


def test_mlx_lm_imports_only_names_that_the_stand_ins_provide() -> None:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "utils.py").read_text()
    imported = {
        node.module: {name.name for name in node.names}
        for statement in ast.parse(source).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert imported["tokenizer_utils"] <= set(UNUSED["mlx_lm.tokenizer_utils"])
    assert imported["huggingface_hub"] <= set(UNUSED["huggingface_hub"])
    assert not any(name.partition(".")[0] in {"transformers", "tokenizers"} for name in imported)


def test_mlx_lm_is_loaded_without_the_unused_modules(tmp_path: Path) -> None:
    code = "import sys; from mlx_ring.core.lean_imports import import_mlx_lm as load; load(); import mlx_lm.utils as u; "
    output = "print(*sorted(n for n in ('huggingface_hub', 'mlx_lm.tokenizer_utils') if n in sys.modules), callable(u.load_model))"
    assert output_of(tmp_path, code + output) == ["True"]


def test_native_kernels_import_no_more_of_mlx_lm(tmp_path: Path) -> None:
    code = "import sys; from mlx_ring.core.lean_imports import import_mlx_lm as load; load(); "
    use = "from mlx_cpu_kernels import speed_up as use; use(); "
    output = "print(*sorted(n for n in ('huggingface_hub', 'transformers') if n in sys.modules), sys.modules['mlx_lm.utils'].load_model.__name__)"
    assert output_of(tmp_path, code + use + output) == ["load_model"]


def test_transformers_offers_the_tokenizer_modules_without_its_init(tmp_path: Path) -> None:
    code = (
        "import sys; from mlx_ring.core import lean_imports; lean_imports._import_bare(); "
        "import transformers; print(transformers.AutoTokenizer.__module__, transformers.PreTrainedTokenizerFast.__module__, "
        "type(sys.modules['transformers']).__name__)"
    )
    assert output_of(tmp_path, code) == [
        "transformers.models.auto.tokenization_auto",
        "transformers.tokenization_utils_tokenizers",
        "module",
    ]


def test_tokenizers_are_imported_without_the_hub_s_api_which_is_whole_afterwards(tmp_path: Path) -> None:
    code = """
import sys
from mlx_ring.core.lean_imports import UNUSED_BY_TOKENIZERS, _import_bare
_import_bare()
print(*(name for name in UNUSED_BY_TOKENIZERS if name in sys.modules))
from transformers.utils import hub
import huggingface_hub
for names in UNUSED_BY_TOKENIZERS.values():
    for name in names:
        print(getattr(hub, name) is object and getattr(huggingface_hub, name) is not object)
"""
    assert output_of(tmp_path, code) == ["True"] * 5


IMPORT_TOKENIZERS = """
import sys
from mlx_ring.core import lean_imports
lean_imports.import_tokenizers()
from transformers import AutoTokenizer
def load():
    return AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
def is_whole():
    return type(sys.modules["transformers"]).__name__ == "_LazyModule"
"""


def tokenizer_output(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_TOKENIZERS + code, str(folder)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ids(folder: Path) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Hi").ids


def test_a_tokenizer_is_loaded_without_the_list_of_all_models(tiny_model: Path) -> None:
    assert (
        tokenizer_output("print(load().encode('Hi'), is_whole())", tiny_model) == f"{ids(tiny_model)} False"
    )


def test_the_rest_of_transformers_is_imported_on_use(tiny_model: Path) -> None:
    code = """
import transformers
print(transformers.GPT2Config().model_type, transformers.BertConfig().model_type, is_whole())
from transformers import LlamaConfig
print(LlamaConfig().model_type, isinstance(load(), transformers.PreTrainedTokenizerBase))
"""
    assert tokenizer_output(code, tiny_model).split() == ["gpt2", "bert", "True", "llama", "True"]


def test_a_tokenizer_of_an_unknown_class_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "UnknownTokenizerFast"}))
    assert tokenizer_output("print(load().encode('Hi'))", tmp_path) == str(ids(tiny_model))


def test_transformers_of_another_structure_is_imported_as_a_whole(tiny_model: Path) -> None:
    code = """
for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
import importlib.metadata
version = importlib.metadata.version
def fail(name):
    raise ImportError(name)
importlib.metadata.version = fail
lean_imports.import_tokenizers()
importlib.metadata.version = version
from transformers import AutoTokenizer
print(load().encode('Hi'), is_whole())
"""
    assert tokenizer_output(code, tiny_model) == f"{ids(tiny_model)} True"


IMPORT_MLX_LM = "import sys; from mlx_ring.core.lean_imports import import_mlx_lm; import_mlx_lm(); "


def worker_output(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_MLX_LM + code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_worker_starts_without_libraries_that_it_does_not_need() -> None:
    unused = {"transformers", "tokenizers", "huggingface_hub", "httpx", "mlx_lm.tokenizer_utils"}
    unused |= {"importlib.metadata", "email.message", "google.protobuf.text_format"}
    versions = "from mlx_ring.rpc.hello import make_hello; make_hello()"
    code = f"{versions}; import mlx_ring.worker.server; print(*sorted({unused!r} & set(sys.modules)))"
    assert worker_output(code) == []


def test_modules_that_were_left_out_are_imported_on_use() -> None:
    code = "import mlx_lm; from mlx_lm.tokenizer_utils import TokenizerWrapper as T; print(T.__name__, callable(mlx_lm.load))"
    assert worker_output(code) == ["TokenizerWrapper", "True"]


def test_protobuf_uses_nothing_of_its_messages_in_python_where_it_has_them_in_c(tmp_path: Path) -> None:
    code = "import sys, copy; from mlx_ring.rpc.protos import worker_pb2 as protos; "
    use = "m = protos.LoadProgress(bytes_loaded=7); n = copy.deepcopy(m); n.ParseFromString(m.SerializeToString()); "
    output = "print(n == m, str(m).strip(), 'google.protobuf.internal.python_message' in sys.modules)"
    assert output_of(tmp_path, code + use + output) == ["True", "bytes_loaded:", "7", "False"]


def test_protobuf_uses_its_messages_in_python_where_it_has_no_others(tmp_path: Path) -> None:
    choose = "import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'python'; "
    code = "from mlx_ring.rpc.protos import worker_pb2 as protos; m = protos.LoadProgress(bytes_loaded=7); "
    output = "print(type(m).__mro__[1].__name__, protos.LoadProgress.FromString(m.SerializeToString()) == m)"
    assert output_of(tmp_path, choose + code + output) == ["Message", "True"]


def test_protobuf_names_its_messages_in_python_where_they_are_used_or_not_at_all() -> None:
    spec = find_spec("google.protobuf")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    source = (folder / "descriptor_pool.py").read_text() + (folder / "internal" / "builder.py").read_text()
    used = {
        node.attr
        for node in ast.walk(ast.parse(source.replace("from __future__", "from future")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "python_message"
    }
    assert used <= {"_AttachFieldHelpers"}, (
        "a method of the pool in Python, which is not made beside messages in C"
    )
