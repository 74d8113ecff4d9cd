"""Names of the media in a rendered prompt: instances recognise an image by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalKwargsItems

from vllm_omni.kv.identifiers import is_counter


def has_counted_media(prompt: Any) -> bool:
    """Whether vLLM has named media by a counter, as it does when its caches are off."""
    hashes: Mapping[str, Sequence[str]] = prompt.get("mm_hashes") or {}
    return any(is_counter(one) for names in hashes.values() for one in names)


def name_media(prompt: Any) -> Any:
    """Return the rendered prompt with counted media named by their content. Reads every pixel.

    With names from a counter, instances would not recognise an image, and would confuse two that have the same number.
    """
    named = {
        modality: [
            MultiModalHasher.hash_kwargs("blake3", modality=modality, item=dict(item.get_data()))
            if is_counter(one)
            else one
            for one, item in zip(names, prompt["mm_kwargs"][modality], strict=True)
        ]
        for modality, names in prompt["mm_hashes"].items()
    }
    return {**prompt, "mm_hashes": named}


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
