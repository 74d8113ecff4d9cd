"""``RequestContext`` and ``StageRequest``: what a request is, for all of its nodes and for one stage."""

from __future__ import annotations

from typing import Any

import msgspec


class RequestContext(msgspec.Struct, frozen=True):
    """What is decided when a request is opened; it travels to every node. What nodes find out is a ``NodeReport``."""

    request_id: str
    params: dict[str, Any]  # by stage: ``SamplingParams``, of a diffusion stage ``DiffusionParams``
    options: dict[str, Any]  # validated by the pipeline: speaker, num_reply_tokens, ...
    lora_request: Any = None  # of vLLM
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    engine_kwargs: dict[str, Any] = {}  # more for ``AsyncLLM.generate`` of the first stage
    modalities: tuple[str, ...] = ()  # that the user gets
    deadline_s: float | None = None  # of the whole request, from its start; the call ends it
    # Stage -> its replica that the request runs on, of stages whose controllers are beside their engines.
    places: dict[str, str] = {}

    @property
    def session_id(self) -> str | None:
        """The session whose requests share state and replicas."""
        session_id: str | None = self.engine_kwargs.get("session_id")
        return session_id


class PromptCache(msgspec.Struct, frozen=True):
    """The KV cache of a prompt that a stage has computed, for a stage that continues behind it (``pass_cache``)."""

    prompt: Any  # rendered, as the stage has read it
    pages: dict[str, Any]  # vLLM's ``kv_transfer_params``: where the pages lie


class StageRequest(msgspec.Struct, frozen=True):
    """A stage's request, made by the pipeline."""

    prompt: Any  # a vLLM prompt; rendered (``vllm.inputs.tokens_input``) behind the first stage
    args: dict[str, Any] = {}  # stage arguments (stage_model.STAGE_ARGS), msgpack types
    # Of an ar stage: fields of the sampling parameters that follow from the request, whatever is given for the stage.
    sampling_params: dict[str, Any] = {}
    given: tuple[int, ...] = ()  # tokens behind the prompt: those of a reply whose rows are computed again
    # ``PromptCache.pages``: the prompt's KV cache is pulled, and the sampling parameters are those of its stage.
    cache: dict[str, Any] | None = None
    is_read_whole: bool = False  # set by the stage's node: nothing reads pieces of the reply, so it comes as one
