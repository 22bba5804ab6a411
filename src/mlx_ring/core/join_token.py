"""Token that lets a machine join: it names the cluster to trust, and holds a secret that the cluster trusts.

`mlxring1` and 96 characters of lower-case base32, one word, so that a double click
selects all of it. They hold 60 bytes: the SHA-256 of the cluster CA's certificate (32), the
token's id (4), its secret (20), and the CRC-32 of prefix and all before (4). The CRC detects
every single changed character.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field

from mlx_ring.core.errors import TokenRefused

PREFIX = "mlxring1"
FINGERPRINT_BYTES, ID_BYTES, SECRET_BYTES, _CHECK_BYTES = 32, 4, 20, 4
_TEXT_LENGTH = len(PREFIX) + (FINGERPRINT_BYTES + ID_BYTES + SECRET_BYTES + _CHECK_BYTES) * 8 // 5


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Join token. `str(token)` is its text; its `repr` keeps the secret out of logs."""

    fingerprint: bytes
    """SHA-256 of the CA's certificate (DER)."""
    id: bytes
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        content = self.fingerprint + self.id + self.secret
        return PREFIX + base64.b32encode(content + _check(content)).decode().lower()


def parse_token(text: str) -> JoinToken:
    """Read a token's text. White space in it comes from a terminal's line breaks.

    Raises:
        TokenRefused: the text is no token, or incomplete, or has a typing error.
    """
    word = "".join(text.split())
    if not word.startswith(PREFIX):
        raise TokenRefused(
            f"A join token begins with {PREFIX}: copy one from `mlx-ring token create` on the head."
        )
    if len(word) != _TEXT_LENGTH:
        raise TokenRefused(
            f"The join token has {len(word)} characters instead of {_TEXT_LENGTH}: copy all of it."
        )
    content, check = _split(word)
    if check != _check(content):
        raise TokenRefused(_MISTYPED)
    end = FINGERPRINT_BYTES + ID_BYTES
    return JoinToken(content[:FINGERPRINT_BYTES], content[FINGERPRINT_BYTES:end], content[end:])


_MISTYPED = "The join token has a typing error: copy it again exactly."


def _split(word: str) -> tuple[bytes, bytes]:
    text = word.removeprefix(PREFIX)
    try:
        # Not only capitals: some letters outside ASCII have an upper case inside it.
        if not text.isascii() or text != text.lower():
            raise TokenRefused(_MISTYPED)
        decoded = base64.b32decode(text.upper())
    except (binascii.Error, ValueError) as error:
        raise TokenRefused(_MISTYPED) from error
    return decoded[:-_CHECK_BYTES], decoded[-_CHECK_BYTES:]


def _check(content: bytes) -> bytes:
    return zlib.crc32(PREFIX.encode() + content).to_bytes(_CHECK_BYTES, "big")
