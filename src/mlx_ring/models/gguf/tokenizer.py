"""Tokenizers of GGUF files, as the contents of `tokenizer.json` and `tokenizer_config.json`.

A file has the tokens with their kinds, and merges (BPE of bytes) or scores (SentencePiece's BPE). How text is cut
before the merges is not there, only a name for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.models.gguf import GgufFile, shown

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are never made by merges."""
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>")
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>")
_ENDS = frozenset({*_TURN_ENDS, *_TEXT_ENDS})
"""Tokens that end an answer. Many files name only one of them; llama.cpp knows the others by their texts too."""
_PHI3_NAMES = ("phi-3", "phi3")
_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's special tokens that do not strip the white space after them."""
_INSTRUCTION = "[INST]"
"""Control token of the tokenizers of Mistral v0.3 and later."""
_LONGEST_PIECE = 256
"""Most characters of a token whose merges are looked for, at each of its places."""
_SPACE = "\u2581"
"""Character that stands for a space in SentencePiece's tokens."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_O200K_PUNCTUATION}"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_PUNCTUATION}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut into words before merges: by a pattern, or by GPT-2's."""

    pattern: str = ""
    digits: bool = False
    """True if each digit is a word."""
    composes: bool = False
    """True if text is brought into Unicode's form NFC."""
    ignores_merges: bool = False
    """True if a word that is a token is not merged from its parts."""
    begins: bool = False
    """True if a text begins with a token of its own, unless the file says otherwise."""


_GPT2 = _Cut()
_OF_LLAMA3 = _Cut(_LLAMA3, ignores_merges=True, begins=True)
_CUTS = {
    **dict.fromkeys(("gpt-2", "default"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Cut(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Cut(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Cut(_QWEN2, composes=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), _Cut(_GPT4O)),
    **dict.fromkeys(("tekken", "pixtral"), _Cut(_TEKKEN, ignores_merges=True, begins=True)),
}
"""Cuts of the tokenizers of BPE, by llama.cpp's names."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Contents of a tokenizer's files, and its tokens that begin a text and end an answer."""

    content: Mapping[str, object]
    config: Mapping[str, object]
    begin: int | None
    ends: list[int]
    count: int
    """Number of tokens."""


def make_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Make the tokenizer of a file.

    Raises:
        ModelUnsupported: it is of another kind, or cuts text in an unknown way.
        ModelCorrupt: parts of it are missing or contradict each other.
    """
    return _Maker(file).make()


class _Maker:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._kind = file.value("tokenizer.ggml.model", str)
        tokens = self._list("tokens", str)
        if not tokens:
            raise ModelCorrupt(
                f"{file.path} has no tokenizer: tokenizer.ggml.tokens is missing. Fetch it again."
            )
        self._tokens = tokens
        self._kinds = self._list("token_type", int) or [1] * len(tokens)
        if len(self._kinds) != len(tokens):
            raise ModelCorrupt(
                f"{file.path} has {len(tokens)} tokens but the kinds of {len(self._kinds)}. Fetch the file again."
            )
        self._vocabulary = _unique(tokens)

    def make(self) -> GgufTokenizer:
        """Return the tokenizer."""
        if self._kind == "gpt2":
            content, adds_begin = self._byte_pairs()
        elif self._kind == "llama":
            content, adds_begin = self._sentence_pieces()
        else:
            raise ModelUnsupported(
                f"{self._file.path} has a tokenizer of the kind {shown(self._kind)}; gpt2 (BPE) and llama (SentencePiece) "
                "are read: serve the model from a folder with safetensors."
            )
        begin, end = self._id("bos"), self._id("eos")
        given = self._file.value("tokenizer.ggml.add_bos_token", bool)
        adds_begin = begin is not None and (adds_begin if given is None else given)
        adds_end = end is not None and bool(self._file.value("tokenizer.ggml.add_eos_token", bool))
        content["post_processor"] = self._frame(begin if adds_begin else None, end if adds_end else None)
        special = {"bos": begin, "eos": end, "unk": self._id("unknown"), "pad": self._id("padding")}
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{
                f"{name}_token": self._tokens[number]
                for name, number in special.items()
                if number is not None
            },
        }
        if (templates := self._chat_templates()) is not None:
            config["chat_template"] = templates
        return GgufTokenizer(content, config, begin, self._ends(end), len(self._tokens))

    def _chat_templates(self) -> str | list[dict[str, str]] | None:
        """Return the chat template, or all if there are several, such as one for tools; None without any."""
        usual = self._file.value("tokenizer.chat_template", str)
        names = self._file.values("tokenizer.chat_templates") or ()
        given = {name: self._file.value(f"tokenizer.chat_template.{name}", str) for name in names}
        others = [{"name": str(name), "template": each} for name, each in given.items() if each is not None]
        if not others:
            return usual
        return [*([] if usual is None else [{"name": "default", "template": usual}]), *others]

    def _byte_pairs(self) -> tuple[dict[str, Any], bool]:
        name = self._file.value("tokenizer.ggml.pre", str) or "default"
        cut = _CUTS.get(name)
        if cut is None:
            raise ModelUnsupported(
                f"{self._file.path} has a tokenizer that cuts text as {shown(name)}, which is not known; known are "
                f"{', '.join(sorted(_CUTS))}: serve the model from a folder with safetensors."
            )
        merges = self._list("merges", str)
        if merges is None:
            raise ModelCorrupt(f"{self._file.path} has no tokenizer.ggml.merges. Fetch the file again.")
        model = {
            "type": "BPE",
            "ignore_merges": cut.ignores_merges,
            "vocab": self._vocabulary,
            "merges": [self._pair(merge) for merge in merges],
        }
        bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps: list[dict[str, object]] = [{**bytes_of, "use_regex": not cut.pattern}]
        if cut.digits:
            steps.insert(0, {"type": "Digits", "individual_digits": True})
        if cut.pattern:
            pattern = {"Regex": cut.pattern}
            steps.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        content = {
            "version": "1.0",
            "added_tokens": self._added(),
            "normalizer": {"type": "NFC"} if cut.composes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**bytes_of, "use_regex": True},
            "model": model,
        }
        return content, cut.begins

    def _sentence_pieces(self) -> tuple[dict[str, Any], bool]:
        """Return the content for tokens with scores; merges are made from them, the best first."""
        scores = self._list("scores", float)
        if scores is None or len(scores) != len(self._tokens):
            raise ModelCorrupt(
                f"{self._file.path} has {len(self._tokens)} tokens but {len(scores or ())} scores. Fetch the file again."
            )
        longest = max(map(len, self._tokens))
        if longest > _LONGEST_PIECE:
            raise ModelCorrupt(
                f"{self._file.path} has a token of {longest} characters; SentencePiece's have {_LONGEST_PIECE} at most. "
                "Fetch the file again."
            )
        prefix = self._file.value("tokenizer.ggml.add_space_prefix", bool)
        has_prefix = prefix is None or prefix
        unknown = self._id("unknown")
        normalizers: list[dict[str, object]] = [
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        ]
        cut: dict[str, object] | None = None
        decoders: list[dict[str, object]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
            if self._begins_once():
                normalizers = []
                cut = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
            else:
                normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        content = {
            "version": "1.0",
            "added_tokens": self._added(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
            "pre_tokenizer": cut,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._vocabulary,
                "merges": _merges(self._vocabulary, scores),
            },
        }
        return content, True

    def _begins_once(self) -> bool:
        """Report whether a space is added before the whole text only, and not after each control token.

        GGUF does not say so. Hugging Face's tokenizers of Mistral v0.3 and later do it, those of Llama 2 do not.
        """
        return any(
            kind == _CONTROL and token == _INSTRUCTION
            for token, kind in zip(self._tokens, self._kinds, strict=True)
        )

    def _strips(self) -> bool:
        """Report whether special tokens strip the white space after them.

        GGUF does not say so. Hugging Face's tokenizer of Phi-3 does it, and llama.cpp by the model's name.
        """
        name = (self._file.value("general.name", str) or "").lower()
        is_phi3 = self._file.value("general.architecture", str) == "phi3"
        return self._kind == "llama" and (is_phi3 or any(each in name for each in _PHI3_NAMES))

    def _added(self) -> list[dict[str, object]]:
        """Return the tokens that are found in a text before it is cut."""
        alike = {"single_word": False, "lstrip": False, "normalized": False}
        unknown = self._id("unknown") if self._kind == "llama" else None
        strips = self._strips()
        return [
            {
                "id": number,
                "content": token,
                **alike,
                "rstrip": strips and token not in _KEEPS_SPACE,
                "special": kind == _CONTROL or number == unknown,
            }
            for number, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if (kind in (_CONTROL, _USER_DEFINED) or number == unknown) and token
        ]

    def _frame(self, begin: int | None, end: int | None) -> dict[str, object] | None:
        """Return the step that adds tokens around a text."""
        single: list[dict[str, object]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special: dict[str, object] = {}
        for number, at in ((begin, 0), (end, 1)):
            if number is None:
                continue
            token = self._tokens[number]
            special[token] = {"id": token, "ids": [number], "tokens": [token]}
            for form in (single, pair):
                form.insert(0 if at == 0 else len(form), {"SpecialToken": {"id": token, "type_id": 0}})
        if not special:
            return None
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

    def _ends(self, end: int | None) -> list[int]:
        named = [end, self._id("eot"), self._id("eom")]
        known = [
            number
            for number, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS
        ]
        return list(dict.fromkeys(number for number in (*named, *known) if number is not None))

    def _id(self, name: str) -> int | None:
        """Return the number of a special token; None if there is none."""
        found = self._file.value(f"tokenizer.ggml.{name}_token_id", int)
        if found is not None and not 0 <= found < len(self._tokens):
            raise ModelCorrupt(
                f"{self._file.path} gives tokenizer.ggml.{name}_token_id as {found}, but has {len(self._tokens)} tokens. "
                "Fetch the file again."
            )
        return found

    def _pair(self, merge: str) -> list[str]:
        left, _, right = merge[1:].partition(" ")
        if not right:
            raise ModelCorrupt(
                f"{self._file.path} has the merge {shown(merge)}, which is no pair. Fetch it again."
            )
        return [merge[:1] + left, right]

    def _list(self, name: str, kind: type[Any]) -> list[Any] | None:
        values = self._file.values(f"tokenizer.ggml.{name}")
        if values and type(values[0]) is not kind:
            raise ModelCorrupt(
                f"{self._file.path} gives tokenizer.ggml.{name} values such as {shown(values[0])}. Fetch the file again."
            )
        return values


def _unique(tokens: Sequence[str]) -> dict[str, int]:
    """Return the tokens' numbers. A text that occurs again keeps its first; the others get names that no text has."""
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary[token if token not in vocabulary else f"\0{number}\0{token}"] = number
    return vocabulary


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return the pairs of tokens that make a token, in the order in which SentencePiece would merge them."""
    found: list[tuple[float, str, str]] = []
    for token, score in zip(vocabulary, scores, strict=True):
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in parts if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found.extend((score, *pair) for pair in pairs)
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [[left, right] for _, left, right in found]
