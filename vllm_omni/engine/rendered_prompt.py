"""Rendered prompts: token ids and processed media, as vLLM's renderer makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItems


def join_prompts(first: Mapping[str, Any], ids: Sequence[int], last: Mapping[str, Any]) -> dict[str, Any]:
    """One prompt of a rendered prompt, token ids, and another rendered prompt.

    Args:
        first: its further fields (``cache_salt``, ...) are those of the result.
        last: with media; the tokens of each medium depend on that medium alone.
    """
    kwargs, hashes, places = ({**(first.get(name) or {})} for name in ("mm_kwargs", "mm_hashes", "mm_placeholders"))
    offset = len(first["prompt_token_ids"]) + len(ids)
    for modality, items in last["mm_kwargs"].items():
        moved = [replace(place, offset=place.offset + offset) for place in last["mm_placeholders"][modality]]
        places[modality] = [*places.get(modality, ()), *moved]
        kwargs[modality] = [*kwargs.get(modality, ()), *items]
        hashes[modality] = [*hashes.get(modality, ()), *last["mm_hashes"][modality]]
    others = {name: value for name, value in first.items() if name != "prompt"}  # the text of the ids, for logs
    return {
        **others,
        "type": last["type"],
        "prompt_token_ids": [*first["prompt_token_ids"], *ids, *last["prompt_token_ids"]],
        "mm_kwargs": MultiModalKwargsItems(kwargs),
        "mm_hashes": hashes,
        "mm_placeholders": places,
    }
