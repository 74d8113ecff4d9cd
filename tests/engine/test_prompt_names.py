"""Names of a rendered prompt's rows."""

from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange

from vllm_omni.engine.prompt_names import names_of_prompt
from vllm_omni.messages.token_names import Part, TokenNames

PROMPT: dict[str, Any] = {
    "type": "multimodal",
    "prompt_token_ids": [1, 2, 2, 3, 4, 4],
    "mm_hashes": {"video": ["v"], "image": ["i"]},
    "mm_placeholders": {"video": [PlaceholderRange(4, 2)], "image": [PlaceholderRange(1, 2)]},
    "cache_salt": "tenant",
}


def test_a_prompt_is_named_by_its_ids_media_and_salt() -> None:
    names = names_of_prompt(PROMPT, None)
    assert names == TokenNames([1, 2, 2, 3, 4, 4], [Part(1, 2, "image:i"), Part(4, 2, "video:v")], "tenant")


def test_a_prompt_of_tokens_needs_nothing_else() -> None:
    assert names_of_prompt({"type": "token", "prompt_token_ids": [1]}, None) == TokenNames([1])


def test_adapters_are_named_by_name_and_path() -> None:
    adapters = [None, LoRARequest("a", 1, "/a"), LoRARequest("b", 1, "/a"), LoRARequest("a", 1, "/b")]
    salts = [names.salt for one in adapters if (names := names_of_prompt(PROMPT, one)) is not None]
    assert len(set(salts)) == 4
    again = names_of_prompt(PROMPT, LoRARequest("a", 2, "/a"))
    assert again is not None and again.salt == salts[1]


def test_a_prompt_without_tokens_has_no_names() -> None:
    assert names_of_prompt({"type": "embeds", "prompt_embeds": object()}, None) is None
