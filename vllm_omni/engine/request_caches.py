"""Requests whose KV cache travels from stage to stage: what is checked, and what is released when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.cache_edges import CacheSource
from vllm_omni.engine.prompt_names import names_of_prompt
from vllm_omni.engine.transfer_params import KV
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.request import PromptCache
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.relay.hub import RelayHub


def check_prompt(stage: str, prompt: Any) -> None:
    """Check that the KV cache of a rendered prompt can travel: its tokens name it.

    Raises:
        InvalidRequest: it has media or embeddings.
    """
    if prompt["type"] != "token":
        raise InvalidRequest(
            f"stage {stage!r}: a prompt of type {prompt['type']!r}: the KV cache travels to another stage, with "
            "prompts of tokens only; a model that reads media is split by --epd instead"
        )


def check_given(stage: str, source: CacheSource | None, given: Mapping[str, Any]) -> None:
    """Check that no sampling parameters are given for a stage that has those of its source.

    Raises:
        InvalidRequest: some are.
    """
    if source is not None and given:
        raise InvalidRequest(
            f"sampling parameters of stage {stage!r}: {', '.join(given)}: it continues what {source.stage!r} has read, "
            f"with the parameters of that stage: give them for {source.stage!r}"
        )


class RequestCaches:
    """The KV cache that one request of an engine pulls, or announces; and the names of the rows that it publishes.

    The pages that it pulls are released with its first output, when the prompt is computed, if no other request pulls
    them, too; otherwise, and where it never has an output, with the user's request.

    Args:
        source: of the requests that bring a KV cache.
        prompt: rendered.
        hub: of the front end.
        adapter: with which the engine computes the prompt.
    """

    def __init__(
        self,
        source: CacheSource | None,
        spec: StageSpec,
        prompt: Any,
        params: SamplingParams,
        hub: RelayHub,
        adapter: LoRARequest | None = None,
    ) -> None:
        self._prompt, self._hub = prompt, hub
        self._announces = bool(spec.cache_fields)
        self._row_names = names_of_prompt(prompt, adapter) if spec.publishes_rows else None
        self._held: Payload | None = None
        if source is not None and source.is_read_once and params.n == 1:
            pages = ((params.extra_args or {}).get(KV) or {}).get("pages")
            self._held = None if pages is None else decode(pages)

    def note_output(self, output: OmniRequestOutput) -> None:
        """Call it with each output, before its reader gets it."""
        if self._held is not None:
            self._hub.release_payload(self._held, for_all=True)
            self._held = None
        if self._announces and output.kv_transfer_params:
            output.prompt_cache = PromptCache(self._prompt, output.kv_transfer_params)
            output.kv_transfer_params = None
        if output.payloads:
            output.row_names = self._row_names
