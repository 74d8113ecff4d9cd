"""``render_prompt``: a prompt as an engine reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.renderers.inputs.preprocess import parse_model_prompt

from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.pipeline import StageSpec, client_checks

if TYPE_CHECKING:
    from vllm_omni.engine.stage_llm import StageLLM

RENDERED = ("token", "embeds", "multimodal", "enc_dec")  # the types of what vLLM's renderers make of prompts


async def render_prompt(llm: StageLLM, spec: StageSpec, name: str, prompt: Any) -> Any:
    """Tokenize a prompt and process its media; one that vLLM's handlers have rendered is only checked.

    Args:
        name: of the engine, for messages.

    Raises:
        InvalidRequest: it cannot be read.
    """
    if not (isinstance(prompt, dict) and "type" in prompt):  # else it is rendered already
        try:
            parsed = parse_model_prompt(llm.model_config, prompt)
            (prompt,) = await llm.renderer.render_cmpl_async([parsed])
        except Exception as exc:
            raise rejection(exc, name) from exc
    else:
        _check_rendered(prompt)
    # A value of another type would end the engine core's thread that receives requests.
    wrong = [token for token in prompt.get("prompt_token_ids") or () if type(token) is not int]
    if wrong:
        raise InvalidRequest(f"prompt_token_ids: {wrong[0]!r} is not an int")
    if spec.check_prompt is not None:
        with client_checks(f"stage {name!r}: check_prompt"):
            spec.check_prompt(prompt)
    return prompt


def _check_rendered(prompt: dict[str, Any]) -> None:
    kind = prompt["type"]
    if kind not in RENDERED:
        raise InvalidRequest(
            f"prompt: type {kind!r} is none of a rendered prompt's ({', '.join(RENDERED)}); "
            'a text is given as {"prompt": "..."}'
        )
    if kind in ("token", "multimodal") and not isinstance(prompt.get("prompt_token_ids"), list):
        raise InvalidRequest(f"prompt: one of type {kind!r} has prompt_token_ids, a list")
