"""Adapters (LoRA) of a stage's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Tasks
from vllm_omni.errors import InvalidRequest, StageFailed

if TYPE_CHECKING:
    from vllm_omni.engine.stage import StageEngine


async def load_adapter(engine: StageEngine, lora_request: LoRARequest | None) -> LoRARequest | None:
    """Load a request's adapter before the engine does it within a step, where a bad adapter would end it.

    Raises:
        InvalidRequest: the engine has no adapters, or cannot load this one.
        StageFailed: it has not judged the adapter.
    """
    has_adapters = engine.vllm_config.lora_config is not None
    encodes_only = engine.instance is not None and engine.instance.kind == Tasks.E
    if lora_request is None or (encodes_only and not has_adapters):  # adapters concern the language model alone
        return None
    if not has_adapters:
        raise InvalidRequest(f"lora_request: stage {engine.name!r} {without_adapters(engine.config)}")
    try:
        await engine.ask(engine.llm.add_lora(lora_request))
    except StageFailed as exc:
        if isinstance(exc.__cause__, EngineDeadError | TimeoutError):
            raise
        raise InvalidRequest(f"lora_request: {exc}") from exc
    return lora_request


def without_adapters(config: StageConfig) -> str:
    """Why a stage has no adapters, for the end of an error message."""
    if not config.is_autoregressive:
        return "has no adapters (LoRA): only autoregressive stages load them"
    return f"was started without adapters (LoRA); start it with --stage {config.name}.enable_lora=true"
