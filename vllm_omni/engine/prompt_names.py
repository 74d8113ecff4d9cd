"""Name what a stage computes of a prompt (``TokenNames``), as vLLM names the KV pages of these tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from vllm_omni.messages.token_names import Part, TokenNames


def names_of_prompt(prompt: Mapping[str, Any], adapter: LoRARequest | None) -> TokenNames | None:
    """The names of a prompt's tokens; None if it has none.

    Args:
        prompt: rendered, with all of its media.
        adapter: with which the stage computes it.
    """
    if prompt.get("prompt_token_ids") is None:
        return None
    hashes: Mapping[str, Any] = prompt.get("mm_hashes") or {}
    parts = [
        Part(place.offset, place.length, f"{modality}:{name}")
        for modality, names in hashes.items()
        for name, place in zip(names, prompt["mm_placeholders"][modality], strict=True)
    ]
    salt = prompt.get("cache_salt") or ""
    if adapter is not None:  # by name and path, as vLLM does
        salt = json.dumps([salt, adapter.lora_name, adapter.lora_path])
    return TokenNames(prompt["prompt_token_ids"], sorted(parts, key=lambda part: (part.offset, part.name)), salt)
