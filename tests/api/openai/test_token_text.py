"""Single tokens as text and bytes."""

from __future__ import annotations

import weakref

from tests.api.twins import ByteTokenizer

from mlx_ring.api.openai.schemas import TokenTexts


class SentencePieces(ByteTokenizer):
    """Tokenizer of words with their leading space, and of bytes by name."""

    pieces = ("\u2581the", "re", "<0xE2>", "<0x0A>", "\u2581\u2581", "\u2581")

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        return self.pieces[ids] if ids < len(self.pieces) else None

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        del skip_special_tokens, clean_up_tokenization_spaces
        return {0: "the", 1: "re", 2: "\ufffd", 3: "\n", 4: " "}.get(token_ids[0], "")


def test_byte_level_tokens_have_their_bytes() -> None:
    texts = TokenTexts(ByteTokenizer())
    assert [texts[byte].data for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert len({texts[byte].name for byte in range(256)}) == 256


def test_special_tokens_have_their_name_and_are_flagged_special() -> None:
    texts = TokenTexts(ByteTokenizer())
    assert texts[257] == ("<eos>", b"<eos>", True)
    assert not texts[65].special


def test_vocabulary_padding_has_no_text() -> None:
    assert TokenTexts(ByteTokenizer())[300] == ("", b"", False)


def test_sentencepiece_tokens_keep_their_space_and_byte_value() -> None:
    texts = TokenTexts(SentencePieces())
    assert [texts[token].data for token in range(6)] == [b" the", b"re", b"\xe2", b"\n", b"  ", b" "]
    assert not texts[5].special
    assert texts[2].name == "bytes:\\xe2"
    assert texts[9] == ("", b"", False)


def test_token_texts_are_cached_per_tokenizer_and_released_with_it() -> None:
    tokenizer = ByteTokenizer()
    assert TokenTexts(tokenizer)[65] is TokenTexts(tokenizer)[65]
    assert TokenTexts(tokenizer)[65] is not TokenTexts(ByteTokenizer())[65]
    reference = weakref.ref(tokenizer)
    del tokenizer
    assert reference() is None
