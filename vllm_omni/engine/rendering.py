"""``render``: tokenize the user's prompt and process its media, as vLLM's renderer does."""

from __future__ import annotations

from typing import Any

from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.pipeline import StageSpec


async def render(llm: AsyncLLM, prompt: Any, spec: StageSpec, stage: str) -> Any:
    """Render a prompt for the first stage; one that vLLM's handlers have rendered is only checked.

    Args:
        stage: its name in errors.

    Raises:
        InvalidRequest: the prompt cannot be read.
    """
    if not (isinstance(prompt, dict) and "type" in prompt):  # else it is rendered already
        try:
            parsed = parse_model_prompt(llm.model_config, prompt)
            (prompt,) = await llm.renderer.render_cmpl_async([parsed])
        except Exception as exc:
            raise rejection(exc, stage) from exc
    # A value of another type would end the engine core's thread that receives requests.
    wrong = [token for token in prompt.get("prompt_token_ids") or () if type(token) is not int]
    if wrong:
        raise InvalidRequest(f"prompt_token_ids: {wrong[0]!r} is not an int")
    if spec.check_prompt is not None:
        spec.check_prompt(prompt)
    return prompt
