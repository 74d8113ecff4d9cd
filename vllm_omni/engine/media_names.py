"""Names of media: engines recognise an image by its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalKwargsItems

from vllm_omni.messages.media_counts import MEDIA_POOL


def keeps_media(config: VllmConfig) -> bool:
    """Whether an engine keeps its encoded media in the host's pool, under their names."""
    return MEDIA_POOL in config.additional_config


def of_tenant(identifier: str, cache_salt: str | None) -> str:
    """The name of an image in the pool for requests with this salt: they share it with no others."""
    return hashlib.sha256(f"{cache_salt}\0{identifier}".encode()).hexdigest() if cache_salt else identifier


def without_media(prompt: Mapping[str, Any], is_known: Callable[[str], bool]) -> Mapping[str, Any]:
    """Return the rendered prompt without the media of these names; their placeholder tokens stay."""
    hashes: Mapping[str, Sequence[str]] = prompt["mm_hashes"]
    kept = {modality: [n for n, one in enumerate(names) if not is_known(one)] for modality, names in hashes.items()}

    def pick(lists: Mapping[str, Any]) -> dict[str, list[Any]]:
        return {modality: [lists[modality][n] for n in numbers] for modality, numbers in kept.items() if numbers}

    return {
        **prompt,
        "mm_hashes": pick(hashes),
        "mm_kwargs": MultiModalKwargsItems(pick(prompt["mm_kwargs"])),
        "mm_placeholders": pick(prompt["mm_placeholders"]),
    }
