"""``EngineWithDefaults``: ``AsyncOmni`` for vLLM's handlers, which know the arguments of ``EngineClient`` alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.stage_params import RequestDefaults
from vllm_omni.messages.outputs import OmniRequestOutput


class EngineWithDefaults:
    """Adds the same defaults to every request; everything else is the engine's own."""

    def __init__(self, engine: AsyncOmni, defaults: RequestDefaults) -> None:
        self.engine = engine
        self.defaults = defaults

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[OmniRequestOutput, None]:
        return self.engine.generate(*args, **kwargs, defaults=self.defaults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
