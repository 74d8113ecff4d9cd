"""Image, audio and video files: encode, decode, limits."""

from collections.abc import Mapping
from typing import TypeVar

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

F = TypeVar("F")


def find_format(kind: str, formats: Mapping[str, F], name: str, param: str | None = None) -> F:
    """Look up a file format; raises ``InvalidRequest`` for an unknown name, with the nearest and all valid ones."""
    if name not in formats:
        raise InvalidRequest(f"unknown {kind} format {name!r}: {suggest(name, formats)}", param=param)
    return formats[name]
