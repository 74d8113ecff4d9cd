"""``StageOutput``: an output of a stage on its way to other nodes and to the user."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from PIL import Image
from vllm.logprobs import PromptLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.v1.metrics.stats import RequestStateStats

from vllm_omni.media.image import to_image
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.request import PromptCache
from vllm_omni.messages.token_names import TokenNames


class StageOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One output of a stage, as the code of pipelines (``route``, ``frames``, transfer functions, ``combine``,
    functions) gets it, and the answer of the user.

    All readers of a field get the same object. The fields are those of vLLM's ``RequestOutput`` and of
    ``OmniRequestOutput``: a delta, unless the field is not streamed.
    """

    request_id: str  # of the engine's request
    outputs: list[CompletionOutput] = []  # the text and its token ids, by answer
    prompt_token_ids: list[int] | None = None
    finished: bool = False  # the last output of the stage's request
    payloads: list[Payload] = []  # references to tensors, which the next stage pulls
    multimodal_output: dict[str, Any] = {}  # see ``OmniRequestOutput``; media that the front end has fetched
    prompt: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: np.ndarray | None = None
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    prompt_cache: PromptCache | None = None  # of a stage that passes its KV cache on; with the last output
    row_names: TokenNames | None = None  # of the prompt's rows, with the payloads that have them

    @classmethod
    def of(cls, output: OmniRequestOutput) -> StageOutput:
        """Share the values of an engine's output."""
        return cls(
            output.request_id,
            output.outputs,
            output.prompt_token_ids,
            output.finished,
            output.payloads,
            output.multimodal_output,
            output.prompt,
            output.prompt_logprobs,
            output.prompt_token_id_logprobs,
            output.metrics,
            output.lora_request,
            output.num_cached_tokens,
            output.num_cache_creation_tokens,
            output.kv_transfer_params,
            output.ec_transfer_params,
            output.prompt_cache,
            output.row_names,
        )

    def to_request_output(self, request_id: str) -> OmniRequestOutput:
        """The user's output, which shares the values except for payloads and media."""
        output = OmniRequestOutput(
            request_id,
            self.prompt,
            self.prompt_token_ids,
            self.prompt_logprobs,
            self.outputs,
            self.finished,
            self.metrics,
            self.lora_request,
            None,
            None,
            self.num_cached_tokens,
            self.num_cache_creation_tokens,
            prompt_token_id_logprobs=self.prompt_token_id_logprobs,
            kv_transfer_params=self.kv_transfer_params,
            ec_transfer_params=self.ec_transfer_params,
        )
        output.add_fields()
        return output

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def images(self) -> list[Image.Image]:
        """The images; empty without any."""
        return [to_image(pixels) for pixels in self.multimodal_output.get("images", ())]
