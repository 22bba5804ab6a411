"""Tokenizers of GGUF files, against the ones that their tokens and merges were taken from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer  # pyright: ignore[reportUnknownVariableType] - untyped
from tests.examples import examples
from tests.models.gguf.writing import Value, gguf_bytes
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.models.gguf import GgufFile, read_gguf
from mlx_ring.models.gguf.tokenizer import make_tokenizer

CORPUS = Path(__file__).parents[3] / "docs"
TEXTS = [
    "Hello, world!  How's it going? It'll cost 12345.67 €.",
    "def f(x):\n    return x ** 2  # \tcomment\r\n\n\n",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "日本語のテキスト, Привет мир! 🎉👩‍👩‍👧 café naïve e\u0301",
    " leading and trailing   ",
    "a\u00a0b\u2003c\u200bd",
    "<s>[INST] Hi there[/INST]  I am[/INST][INST]x</s> y",
    "<|user|>\n  What is it?<|end|>\n<|endoftext|> a</s>\tb<unk>\nc<s> d",
    "",
]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Patterns as the Hugging Face tokenizers of these models have them."""
QWEN2 = LLAMA3.replace("{1,3}", "")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = {"mistral": ["[INST]", "[/INST]"], "phi3": ["<|endoftext|>", "<|user|>", "<|end|>"]}
"""Further special tokens of the forms of SentencePiece's tokenizers."""


def corpus() -> Iterator[str]:
    return (file.read_text(encoding="utf-8") for file in sorted(CORPUS.glob("*.md")))


def byte_pairs(name: str) -> Tokenizer:
    """Train a tokenizer of BPE on bytes that cuts text as the models of llama.cpp's name do."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: dict[str, list[Any]] = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), plain],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), plain],
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps[name])
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def sentence_pieces(form: str) -> Tokenizer:
    """Train a tokenizer as SentencePiece's BPE: spaces are a character of the tokens, unknown ones become bytes.

    Form `mistral` puts a space before a text, as Hugging Face's of Mistral v0.3 does, `llama` before each part of it
    between special tokens, `plain` nowhere. After the special ones of `phi3` white space is stripped.
    """
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106 - no password
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form != "plain":
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(MARKS.get(form, ())), *octets]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue] - the stub lacks None
    tokenizer.decoder = decoders.Sequence(ends)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in octets]
    if form == "mistral":
        content["normalizer"] = None
        space = {"replacement": "▁", "prepend_scheme": "first", "split": False}
        content["pre_tokenizer"] = {"type": "Metaspace", **space}
    for token in content["added_tokens"]:
        token["rstrip"] = form == "phi3" and token["content"] in ("</s>", "<|user|>", "<|end|>")
    return Tokenizer.from_str(json.dumps(content))


def metadata_of(tokenizer: Tokenizer, kind: str, **more: Value) -> dict[str, Value]:
    """Return what a GGUF file has of a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = cast("dict[str, int]", model["vocab"])
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    kinds = [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
    made = [left + right for left, right in model["merges"]]
    scores = {token: -float(place) for place, token in reversed(list(enumerate(made)))}
    own: dict[str, Value] = {"model": kind, "tokens": tokens, "token_type": kinds}
    if kind == "llama":
        own["scores"] = [scores.get(token, -1e9) for token in tokens]
        own["unknown_token_id"] = 0
    else:
        own["merges"] = [f"{left} {right}" for left, right in model["merges"]]
    return {f"tokenizer.ggml.{name}": value for name, value in {**own, **more}.items()}


def write(folder: Path, metadata: Mapping[str, Value]) -> GgufFile:
    (folder / "a.gguf").write_bytes(gguf_bytes(metadata, {}))
    return read_gguf(folder / "a.gguf")


@pytest.fixture(
    scope="module",
    params=["gpt-2", "smollm", "llama-bpe", "qwen2", *(f"spm {form}" for form in ("llama", "plain", *MARKS))],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    """Give a trained tokenizer, and the one of a GGUF file that was made of it."""
    name = cast("str", request.param)
    kind, _, form = name.partition(" ")
    if kind == "spm":
        trained = sentence_pieces(form)
        metadata = metadata_of(trained, "llama", add_space_prefix=form != "plain")
        metadata["general.architecture"] = "phi3" if form == "phi3" else "llama"
    else:
        trained = byte_pairs(name)
        metadata = metadata_of(trained, "gpt2", pre=name)
    made = make_tokenizer(write(tmp_path_factory.mktemp("made"), metadata))
    return trained, Tokenizer.from_str(json.dumps(made.content))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_tokenizer_the_file_was_made_of(
    pair: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    expected, found = (each.encode(text, add_special_tokens=False) for each in pair)
    assert found.tokens == expected.tokens
    assert found.ids == expected.ids
    assert pair[1].decode(found.ids, skip_special_tokens=False) == pair[0].decode(
        expected.ids, skip_special_tokens=False
    )


@examples(2)
@given(st.text(max_size=60))
def test_tokens_of_any_text_are_those_too(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    expected, found = (each.encode(text, add_special_tokens=False).ids for each in pair)
    assert found == expected


def test_a_long_document_has_the_same_tokens(pair: tuple[Tokenizer, Tokenizer]) -> None:
    text = "\n".join(corpus())[:20_000]
    expected, found = (each.encode(text, add_special_tokens=False).ids for each in pair)
    assert len(expected) > 1000
    assert found == expected


MORE: dict[str, Value] = {"bos_token_id": 1, "eos_token_id": 2, "pre": "gpt-2"}


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return byte_pairs("gpt-2")


@pytest.mark.parametrize(
    ("more", "begin", "end"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(
    tmp_path: Path, plain: Tokenizer, more: dict[str, Value], *, begin: bool, end: bool
) -> None:
    made = make_tokenizer(write(tmp_path, metadata_of(plain, "gpt2", **{**MORE, **more})))
    ids = Tokenizer.from_str(json.dumps(made.content)).encode("Hello").ids
    assert (ids[0] == 1, ids[-1] == 2) == (begin, end)


def test_the_folder_has_a_chat_template_and_the_ends_of_a_turn(tmp_path: Path, plain: Tokenizer) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    metadata = metadata_of(plain, "gpt2", bos_token_id=1, eos_token_id=0, pre="gpt-2")
    made = make_tokenizer(write(tmp_path, {**metadata, "tokenizer.chat_template": template}))
    assert made.ends == [0, 2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made.content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(made.config))
    tokenizer: Any = load_tokenizer(tmp_path, eos_token_ids=made.ends)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>Hi<|im_end|>"
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.eos_token_ids == {0, 2}


@pytest.mark.parametrize("named", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
@pytest.mark.parametrize(
    "other", ["<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>", "<end_of_utterance>"]
)
def test_a_text_ends_too_where_the_file_names_the_end_of_a_turn(
    tmp_path: Path, named: str, other: str
) -> None:
    def ends(kind: int) -> list[int]:
        metadata: dict[str, Value] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", other, named],
            "tokenizer.ggml.token_type": [1, kind, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 2,
        }
        return make_tokenizer(write(tmp_path, metadata)).ends

    assert [ends(kind) for kind in (3, 4, 1)] == [[2, 1], [2, 1], [2]]


def test_a_model_by_the_name_of_phi_3_strips_white_space_too(tmp_path: Path) -> None:
    """Take only tokenizers of SentencePiece: Phi-4 has Phi-3's architecture, and its special tokens strip nothing."""

    def strips(tokenizer: Tokenizer, kind: str, name: str, architecture: str) -> bool:
        metadata = {**metadata_of(tokenizer, kind, pre="gpt-2"), "general.name": name}
        metadata["general.architecture"] = architecture
        content: Any = make_tokenizer(write(tmp_path, metadata)).content
        return any(token["rstrip"] for token in content["added_tokens"])

    pieces = sentence_pieces("phi3")
    assert strips(pieces, "llama", "Phi-3 mini", "llama")
    assert strips(pieces, "llama", "My model", "phi3")
    assert not strips(pieces, "llama", "My model", "llama")
    assert not strips(byte_pairs("gpt-2"), "gpt2", "Phi 4", "phi3")


def test_a_user_defined_token_is_never_cut_and_is_no_special_one(tmp_path: Path, plain: Tokenizer) -> None:
    metadata = metadata_of(plain, "gpt2", pre="gpt-2")
    kinds = cast("list[int]", metadata["tokenizer.ggml.token_type"])
    metadata["tokenizer.ggml.token_type"] = [kinds[0], 4, *kinds[2:]]
    made = Tokenizer.from_str(json.dumps(make_tokenizer(write(tmp_path, metadata)).content))
    assert made.encode("x<|im_start|>y", add_special_tokens=False).ids[1] == 1
    assert made.decode([1], skip_special_tokens=True) == "<|im_start|>"
    assert made.decode([2], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, ModelUnsupported, "kind 'bert'"),
        ({"pre": "poro-chat"}, ModelUnsupported, "'poro-chat'.*gpt-2"),
        ({"tokens": []}, ModelCorrupt, "no tokenizer"),
        ({"tokens": [1, 2]}, ModelCorrupt, "values such as 1"),
        ({"token_type": [1]}, ModelCorrupt, "kinds of 1"),
        ({"merges": ["a"]}, ModelCorrupt, "merge 'a'"),
        ({"eos_token_id": 10**9}, ModelCorrupt, "eos_token_id as 1000000000"),
        ({"bos_token_id": "x"}, ModelCorrupt, "must be a int"),
        ({"model": "llama"}, ModelCorrupt, "0 scores"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_refused(
    tmp_path: Path, plain: Tokenizer, changes: dict[str, Value], error: type[Exception], message: str
) -> None:
    metadata = metadata_of(plain, "gpt2", **{"pre": "gpt-2", **changes})
    with pytest.raises(error, match=message):
        make_tokenizer(write(tmp_path, metadata))


def test_an_endless_token_is_refused_before_its_merges_are_looked_for(tmp_path: Path) -> None:
    tokens: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "a" * 3_000_000],
        "tokenizer.ggml.scores": [0.0, -1.0],
    }
    with pytest.raises(ModelCorrupt, match="token of 3000000 characters"):
        make_tokenizer(write(tmp_path, tokens))


def test_tokens_of_one_text_keep_their_numbers(tmp_path: Path) -> None:
    tokens: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "a", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    made = Tokenizer.from_str(json.dumps(make_tokenizer(write(tmp_path, tokens)).content))
    assert made.encode("aba").ids == [3, 0]
    assert made.get_vocab_size() == 4
