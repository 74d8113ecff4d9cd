"""``TokenNames``: what determines what a stage computes of a prompt, so that caches of it can be recognised.

Rows that another stage has computed are numbers. Computed in another batch, or kept, they differ in the last bits, so
their bytes name nothing. They are named by what they were computed from, as vLLM names a KV page: token ids, media,
adapter and salt.
"""

from __future__ import annotations

import hashlib

import msgspec


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A name of some tokens beside their ids: of an image, for example."""

    offset: int
    length: int
    name: str


class TokenNames(msgspec.Struct, frozen=True):
    """Names of the first tokens of a prompt: where they are equal up to a token, so is all that a stage computes up to
    it, KV pages or rows.

    What is behind the last name has none: no other request shares it.

    Attributes:
        token_ids: one for each token; where a prompt is rows, of the stage that has computed them.
        parts: by their offset; they may overlap.
        salt: of all tokens.
    """

    token_ids: list[int]
    parts: list[Part] = []
    salt: str = ""

    def first(self, num_tokens: int) -> TokenNames:
        """The names of the first tokens."""
        parts = [one for one in self.parts if one.offset < num_tokens]
        return TokenNames(self.token_ids[:num_tokens], parts, self.salt)

    def digest(self, num_tokens: int) -> str:
        """A name of the first tokens, for what depends on all of them."""
        return hashlib.sha256(msgspec.msgpack.encode(self.first(num_tokens))).hexdigest()


_decoder = msgspec.msgpack.Decoder(TokenNames)


def encode_names(names: TokenNames) -> bytes:
    """Names as they travel among the stage arguments."""
    return msgspec.msgpack.encode(names)


def decode_names(data: bytes) -> TokenNames:
    """Inverse of ``encode_names``."""
    return _decoder.decode(data)
