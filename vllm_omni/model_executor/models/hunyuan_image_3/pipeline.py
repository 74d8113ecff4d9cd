"""HunyuanImage-3: language model -> image decoder. One language model reads, writes and denoises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.tokenizers import cached_get_tokenizer
from vllm.transformers_utils.config import try_get_generation_config

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.canvas_step import PICTURE, STEP
from vllm_omni.messages.payload import encode
from vllm_omni.model_executor.models.hunyuan_image_3 import image_decoder, language_model
from vllm_omni.model_executor.models.hunyuan_image_3.config import PIXELS_PER_TOKEN, Sizes, TokenIds
from vllm_omni.model_executor.models.hunyuan_image_3.graph import build_graph
from vllm_omni.model_executor.models.hunyuan_image_3.prompt import (
    CHAT_TEMPLATE,
    CUT,
    Roles,
    picture_prompt,
    sections_of,
)
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest
from vllm_omni.unified.layout import GRID
from vllm_omni.unified.params import IMAGE, ImageParams, check_sampling, params_of
from vllm_omni.unified.plan import Guidance, ImagePlan
from vllm_omni.unified.preface import Preface
from vllm_omni.unified.spans import spans_of_placeholder, tokens_of_a_step

NOT_READ = (
    "negative_prompt", "image_guidance_scale", "guidance_interval", "guidance_renorm", "guidance_renorm_min",
)  # fmt: skip
"""Fields of ``ImageParams`` that other models have."""

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

DEFAULTS = {"num_inference_steps": "diff_infer_steps", "guidance_scale": "diff_guidance_scale", "shift": "flow_shift"}
"""Fields of it -> names in the checkpoint's ``generation_config.json``."""


class HunyuanImage3Pipeline(Pipeline):
    """Text and images in; text, and a picture, out.

    A prompt that ends with ``<recaption>`` or ``<think>`` is one to which the model writes a text in front of the
    picture.
    """

    modalities = {"text": "text", "image": "image"}
    chat_template = CHAT_TEMPLATE

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.tokenizer = cached_get_tokenizer(model, revision=revision)
        self.sizes = Sizes(hf_config.image_base_size)
        self.ids = TokenIds(self.tokenizer.get_vocab(), self.sizes.base)
        self.cut = self.tokenizer.get_vocab()[CUT]
        self.roles = Roles(self._encode)
        generation = try_get_generation_config(model, trust_remote_code=False, revision=revision)
        self.defaults = {
            name: value for name, of in DEFAULTS.items() if (value := getattr(generation, of, None)) is not None
        }
        self.has_roles = getattr(generation, "sequence_template", "instruct") == "instruct"
        self.graph = build_graph(self.latents_to_decoder)
        self.stages = (
            StageSpec(
                "language_model",
                architecture=language_model.ARCHITECTURE,
                output_type="text",
                hf_overrides=language_model.language_hf_config,
                publishing_fields=frozenset({"latents"}),
                publishes_pictures=True,
                make_args=self.picture_args,
                engine_args={
                    "enable_prompt_embeds": False,
                    "speculative_config": None,
                    "async_scheduling": False,
                    "enforce_eager": True,  # positions of pictures have another shape in each step
                },
                sampling_params={"stop_token_ids": [self.ids.image_end]},  # of pictures
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

    def picture_prompt(self, text: str, images: Sequence[Any]) -> Any:
        prompt = {"prompt": picture_prompt(text, len(images), has_roles=self.has_roles)}
        return {**prompt, "multi_modal_data": {"image": list(images)}} if images else prompt

    # -- prompts ------------------------------------------------------------------------------------------------------

    async def request_inputs(self, prompt: Any, context: RequestContext) -> Mapping[str, Any]:
        """The prompt, tokenized section by section, with what stands in front of a picture that follows it."""
        read = self._without_cuts(prompt) if _has_ids(prompt) else self._tokenized(prompt)
        ids: list[int] = read["prompt_token_ids"]
        if "image" not in context.modalities or self._writes(ids):
            stops = [self.ids.image_end, *self._stops(ids)]
            return {"prompt": StageRequest(read, sampling_params={"stop_token_ids": stops})}
        start = [self.ids.answer] * self.roles.asks(ids) + self._picture_start(self._params(context))
        read = {**read, "prompt_token_ids": [*ids, *start]}
        return {"prompt": StageRequest(read, sampling_params=GREEDY)}  # it may choose the size

    def _encode(self, section: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(section, add_special_tokens=False)
        return ids

    def _tokenized(self, prompt: Any) -> dict[str, Any]:
        """Raises:
        InvalidRequest: it is no text.
        """
        read = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        text = read.pop("prompt", None)
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt = {text!r}: must be a text or tokens", param="prompt")
        ids = [token for section in sections_of(text) for token in self._encode(section)]
        return {**read, "prompt_token_ids": ids if ids[:1] == [self.ids.bos] else [self.ids.bos, *ids]}

    def _without_cuts(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt that vLLM has tokenized, without what stands between its sections."""
        ids: list[int] = prompt["prompt_token_ids"]
        made = {**prompt, "prompt_token_ids": [token for token in ids if token != self.cut]}
        if places := prompt.get("mm_placeholders"):
            made["mm_placeholders"] = {
                modality: [replace(one, offset=one.offset - ids[: one.offset].count(self.cut)) for one in several]
                for modality, several in places.items()
            }
        return made

    def _writes(self, ids: Sequence[int]) -> bool:
        """Whether the model writes a text in front of a picture."""
        return bool(ids) and ids[-1] in (self.ids.think, self.ids.recaption)

    def _stops(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self._writes(ids):
            return self.ids.recaption_end, self.ids.answer_end, self.ids.eos
        # Where an answer chooses the size of a picture, it has ended: the user asked for a text.
        first = self.ids.first_ratio
        return (self.ids.eos, *range(first, first + len(self.sizes.grids)))

    def _picture_start(self, given: ImageParams) -> list[int]:
        """The tokens in front of a picture; without a size, the model chooses it behind them."""
        shape = self._shape(given)
        start = [self.ids.image_start, self.ids.size]
        return start if shape is None else [*start, self.ids.first_ratio + shape]

    # -- pictures -----------------------------------------------------------------------------------------------------

    def _params(self, context: RequestContext) -> ImageParams:
        """What a request says of its picture; else the checkpoint.

        Raises:
            InvalidRequest: a parameter is wrong, or one of another model.
        """
        extra_args = context.params["language_model"].extra_args or {}
        given, default = params_of(extra_args), ImageParams()
        for name in NOT_READ:
            if (value := getattr(given, name)) != getattr(default, name):
                said = "the guidance of this model has a scale alone: leave it out"
                raise InvalidRequest(f"{name} = {value!r} has no effect: {said}", param=name)
        return params_of({**extra_args, IMAGE: {**self.defaults, **(extra_args.get(IMAGE) or {})}})

    def _shape(self, given: ImageParams) -> int | None:
        """The index of the size given; None: the model chooses.

        Raises:
            InvalidRequest: pictures have no such size.
        """
        if given.height is None and given.width is None:
            return None
        if given.height is None or given.width is None:
            raise InvalidRequest("width and height are given together, or the model chooses both", param="size")
        if min(given.height, given.width) < 1:
            raise InvalidRequest(f"size = {given.width}x{given.height}: must be above 0", param="size")
        shape = self.sizes.nearest(given.height, given.width)
        rows, columns = self.sizes.grids[shape]
        made = rows * PIXELS_PER_TOKEN, columns * PIXELS_PER_TOKEN
        if (given.height, given.width) not in (made, self.sizes.all[shape]):
            said = f"the nearest size of this model is {made[1]}x{made[0]}"
            raise InvalidRequest(f"size = {given.width}x{given.height}: {said}", param="size")
        return shape

    def picture_args(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], config: VllmConfig
    ) -> dict[str, Any]:
        """The plan of a request's picture, if the answer has one.

        Raises:
            InvalidRequest: a parameter is wrong, or there is no room for the picture.
        """
        places = (request.prompt.get("mm_placeholders") or {}).get("image", ())
        step_tokens = tokens_of_a_step(config.scheduler_config)
        for image in (span for one in places for span in spans_of_placeholder(one, GRID)):
            if (size := image.end - image.start) > step_tokens:
                said = f"its {size} tokens are computed in one step, which has at most {step_tokens}"
                raise InvalidRequest(f"an image of the prompt is too large: {said} (max_num_batched_tokens)")
        if "latents" not in wanted:
            return {}
        check_sampling(context.params["language_model"], "logprobs")
        given, ids = self._params(context), list(request.prompt["prompt_token_ids"])
        shape, preface = self._shape(given), self._preface(ids, given)
        grids = self.sizes.grids
        plan = ImagePlan(
            max(grids, key=lambda grid: grid[0] * grid[1]) if shape is None else grids[shape],
            given.num_inference_steps,
            given.shift,
            context.params["language_model"].seed if given.seed is None else given.seed,
            guidance=Guidance(given.guidance_scale, 1.0, (0.0, 1.0), "global", 1.0),
            progress=given.progress,
            preview_every=given.preview_every,
            without_text=((0, len(ids)),),
            num_markers=GRID.num_markers,
            mask=self.ids.mask,
            masked=self._masked(ids, [(one.offset, one.offset + one.length) for one in places]),
            preface=preface,
        )
        more = 0 if preface is None else preface.num_more_tokens + bool(preface.stops)
        plan.check_fits(len(ids) + more, step_tokens, config.model_config.max_model_len)
        return {PICTURE: msgspec.to_builtins(plan)}

    def _preface(self, ids: Sequence[int], given: ImageParams) -> Preface | None:
        """What the model writes in front of the picture; None: the picture follows the prompt."""
        sizes = self.sizes
        chosen = (self.ids.first_ratio, tuple(sizes.grids), sizes.square) if self._shape(given) is None else ()
        if not self._writes(ids):
            return Preface((), (), (), (), *chosen) if chosen else None
        kept = (self.ids.recaption_end,)
        end = kept if ids[-1] == self.ids.recaption else ()
        return Preface(self._stops(ids), kept, end, (self.ids.answer, *self._picture_start(given)), *chosen)

    def _masked(self, ids: Sequence[int], images: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The tokens of a prompt that are not read without it: the user's, but for images, and a thought's start."""
        num_tokens = len(ids)
        for last in (self.ids.recaption, *range(self.ids.first_ratio, self.ids.first_ratio + len(self.sizes.grids))):
            num_tokens -= num_tokens == len(ids) and ids[-1] == last
        start = (self.ids.answer, self.ids.image_start, self.ids.size)
        while num_tokens and ids[num_tokens - 1] in start:
            num_tokens -= 1
        ranges = [(first, min(end, num_tokens)) for first, end in self.roles.user_ranges(ids)]
        if ids[-1] == self.ids.think:
            ranges.append((len(ids) - 1, len(ids)))
        made = []
        for first, end in ranges:
            for image, behind in images:
                if first <= image < end:
                    made.append((first, image))
                    first = behind
            made.append((first, end))
        return tuple((first, end) for first, end in made if first < end)

    async def latents_to_decoder(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Let the decoder have a picture when it is complete, and previews and progress before."""
        output_type = params_of(call.context.params["language_model"].extra_args).output_type
        async for chunk in chunks:
            output: StageOutput | None = chunk.payload
            for payload in output.payloads if output is not None else ():
                args = {"payloads": [encode(payload)], "output_type": output_type}
                yield Chunk(StageRequest(tokens_input([0]), args), last=STEP not in payload.values)


def _has_ids(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "prompt_token_ids" in prompt
