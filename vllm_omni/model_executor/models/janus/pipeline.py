"""Janus-Pro: language model -> image decoder. One language model reads text and images, and writes both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import msgspec
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_get_tokenizer
from vllm.transformers_utils.config import try_get_generation_config

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.token_step import TOKEN_PICTURE
from vllm_omni.model_executor.models.janus import image_decoder
from vllm_omni.model_executor.models.janus.config import ARCHITECTURE, IMAGE_START, language_hf_config
from vllm_omni.model_executor.models.janus.graph import build_graph
from vllm_omni.model_executor.models.janus.prompt import CHAT_TEMPLATE, picture_prompt
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest
from vllm_omni.unified.params import IMAGE, ImageParams, check_sampling, params_of
from vllm_omni.unified.tokens import TokenPlan

DEFAULT_SCALE = 5.0  # of the published code
FIELDS = ("output_type", "num_outputs_per_prompt", "width", "height", "seed", "guidance_scale")
"""Fields of ``ImageParams`` that this model has."""


class JanusPipeline(Pipeline):
    """Text and images in; text, or after a text a picture, out."""

    modalities = {"text": "text", "image": "image"}
    extra_outputs = {"picture_tokens": "picture_tokens"}
    chat_template = CHAT_TEMPLATE

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        tokenizer = cached_get_tokenizer(model, revision=revision)
        self.image_start = tokenizer.convert_tokens_to_ids(IMAGE_START)
        self.kept_ids, self.pad = {tokenizer.bos_token_id, self.image_start}, tokenizer.pad_token_id
        generation = try_get_generation_config(model, trust_remote_code=False, revision=revision)
        self.default_scale = float(getattr(generation, "guidance_scale", None) or DEFAULT_SCALE)
        vq = hf_config.vq_config
        self.first_id: int = hf_config.text_config.vocab_size
        self.num_tokens: int = vq.num_patches**2
        self.side = vq.num_patches * 2 ** (len(vq.channel_multiplier) - 1)  # pixels
        self.graph = build_graph(self.tokens_to_decoder)
        self.stages = (
            StageSpec(
                "language_model",
                architecture=ARCHITECTURE,
                output_type="text",
                hf_overrides=language_hf_config,
                publishes_pictures=True,
                make_args=self.picture_args,
                engine_args={
                    "enable_prompt_embeds": False,
                    "speculative_config": None,
                    "async_scheduling": False,
                },
            ),
            StageSpec(
                "image_decoder",
                architecture=image_decoder.ARCHITECTURE,
                output_type="image",
                hf_overrides=image_decoder.decoder_hf_config,
                weight_prefix=image_decoder.PREFIX,
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: {suggest(name, ())}")
        return {}

    def chat_template_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        return {"is_answered": "image" not in modalities}

    def picture_prompt(self, text: str, images: Sequence[Any]) -> Any:
        if images:
            raise InvalidRequest("the answer is a picture, which this model makes of a text alone: give no images")
        return {"prompt": picture_prompt(text)}

    def picture_args(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], config: VllmConfig
    ) -> dict[str, Any]:
        """The plan of a request's picture, if the answer is one.

        Raises:
            InvalidRequest: a parameter is wrong, there is no room for the picture, or the prompt asks for none.
        """
        if "picture_tokens" not in wanted:
            return {}
        ids: list[int] = request.prompt["prompt_token_ids"]
        if ids[-1:] != [self.image_start]:
            said = f"its prompt must end with {IMAGE_START}; for a text, give modalities ['text']"
            raise InvalidRequest(f"the answer is a picture: {said}")
        if request.prompt.get("mm_placeholders"):
            raise InvalidRequest("the answer is a picture, which this model makes of a text alone: give no images")
        params: SamplingParams = context.params["language_model"]
        check_sampling(params)
        given = params_of(params.extra_args)
        self._check(given)
        # The defaults are those of another model.
        has_scale = "guidance_scale" in ((params.extra_args or {}).get(IMAGE) or {})
        scale = given.guidance_scale if has_scale else self.default_scale
        unconditional = tuple(one if one in self.kept_ids else self.pad for one in ids)
        plan = TokenPlan(self.num_tokens, scale, unconditional, given.seed)
        cache = config.cache_config
        num_blocks = (cache.num_gpu_blocks or 0) // config.parallel_config.data_parallel_size
        plan.check_fits(
            len(ids),
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            num_blocks - 1,  # upstream keeps one
            cache.block_size,
        )
        return {TOKEN_PICTURE: msgspec.to_builtins(plan)}

    def _check(self, given: ImageParams) -> None:
        """Raises:
        InvalidRequest: a parameter has no effect, or asks for another size.
        """
        default = ImageParams()
        for name in ImageParams.__struct_fields__:
            if name not in FIELDS and (value := getattr(given, name)) != getattr(default, name):
                said = "this model writes its pictures as tokens: leave it out"
                raise InvalidRequest(f"{name} = {value!r} has no effect: {said}", param=name)
        for name, value in (("width", given.width), ("height", given.height)):
            if value not in (None, self.side):
                said = f"the pictures of this model have {self.side} by {self.side} pixels"
                raise InvalidRequest(f"{name} = {value}: {said}", param="size")

    async def tokens_to_decoder(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Let the decoder have a picture when all of its tokens are written; a text has none."""
        codes: list[int] = []
        async for chunk in chunks:
            if chunk.payload is not None:
                codes += self.codes_of(chunk.payload)
        if codes:
            output_type = params_of(call.context.params["language_model"].extra_args).output_type
            yield Chunk(StageRequest(tokens_input([0]), {"codes": codes, "output_type": output_type}), seq=0, last=True)

    def extra_output(self, name: str, output: StageOutput) -> Any:
        return self.codes_of(output)

    def codes_of(self, output: StageOutput) -> list[int]:
        """Codes of the decoder's codebook among the tokens of an output."""
        return [token - self.first_id for token in output.outputs[0].token_ids if token >= self.first_id]
