"""BAGEL: language model -> image decoder. One language model reads, writes and denoises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import msgspec
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.tokenizers import cached_get_tokenizer

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.canvas_step import PICTURE, STEP
from vllm_omni.messages.payload import encode
from vllm_omni.model_executor.models.bagel import image_decoder, language_model
from vllm_omni.model_executor.models.bagel.config import (
    IMAGE_END,
    PIXELS_PER_TOKEN,
    TEXT_END,
    TEXT_START,
    vae_file,
)
from vllm_omni.model_executor.models.bagel.graph import build_graph
from vllm_omni.model_executor.models.bagel.processing import IS_DRAWN, PLACEHOLDER, TokenIds
from vllm_omni.model_executor.models.bagel.prompt import CHAT_TEMPLATE
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest
from vllm_omni.unified.params import ImageParams, check_sampling, params_of
from vllm_omni.unified.plan import ImagePlan
from vllm_omni.unified.spans import Span, ranges_without, spans_of_placeholder, tokens_of_a_step

DEFAULT_SIDE = 1024  # pixels


class BagelPipeline(Pipeline):
    """Text and images in; text and a picture out."""

    modalities = {"text": "text", "image": "image"}
    continues_answers = True
    chat_template = CHAT_TEMPLATE

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        vae_file(model, revision)  # before any engine starts
        self.tokenizer = cached_get_tokenizer(model, revision=revision)
        vocabulary = self.tokenizer.get_vocab()
        self.text_start, self.text_end = vocabulary[TEXT_START], vocabulary[TEXT_END]
        self.image_ids = TokenIds.of(vocabulary)
        self.max_latent_size: int = hf_config.max_latent_size
        self.graph = build_graph(self.latents_to_decoder)
        self.stages = (
            StageSpec(
                "language_model",
                architecture=language_model.ARCHITECTURE,
                output_type="text",
                hf_overrides=language_model.language_hf_config,
                publishing_fields=frozenset({"latents"}),
                publishes_pictures=True,
                check_prompt=self.check_prompt,
                make_args=self.picture_args,
                engine_args={
                    "enable_prompt_embeds": False,
                    "speculative_config": None,
                    "async_scheduling": False,
                    "enforce_eager": True,  # which tokens are latents differs from step to step
                },
                sampling_params={"stop_token_ids": [self.text_end, vocabulary[IMAGE_END]]},
            ),
            StageSpec(
                "image_decoder",
                architecture=image_decoder.ARCHITECTURE,
                output_type="image",
                hf_overrides=image_decoder.decoder_hf_config,
                weight_prefix="decoder.",
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: {suggest(name, ())}")
        return {}

    def chat_template_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        return {"is_answered": "text" in modalities}

    def picture_prompt(self, text: str, images: Sequence[Any]) -> Any:
        prompt = {"prompt": f"{PLACEHOLDER * len(images)}{TEXT_START}{text}{TEXT_END}"}
        if not images:
            return prompt
        return {**prompt, "multi_modal_data": {"image": list(images)}, "mm_processor_kwargs": {IS_DRAWN: True}}

    def continue_answer(self, ids: Sequence[int], image: Any) -> tuple[list[int], Any]:
        text = [*takewhile(lambda one: one != self.text_end, ids), self.text_end]
        media = {"multi_modal_data": {"image": [image]}, "mm_processor_kwargs": {IS_DRAWN: True}}
        return text, {"prompt": PLACEHOLDER + TEXT_START, **media}

    def mm_processor_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        return {IS_DRAWN: True} if "image" in modalities else {}

    def check_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Check that each placeholder of an image has one: the rest would be read as a text.

        Raises:
            InvalidRequest: there are fewer images.
        """
        ids, marks = prompt["prompt_token_ids"], (self.image_ids.start, self.image_ids.end)
        if num_empty := sum(pair == marks for pair in pairwise(ids)):
            num_images = len((prompt.get("mm_placeholders") or {}).get("image", ()))
            said = f"the prompt has {num_images + num_empty} placeholders of images ({PLACEHOLDER}), and {num_images}"
            raise InvalidRequest(f"{said} in multi_modal_data: give an image for each")

    def picture_args(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], config: VllmConfig
    ) -> dict[str, Any]:
        """The plan of a request's picture, if the answer has one.

        Raises:
            InvalidRequest: a parameter is wrong, or there is no room for the picture.
        """
        given = params_of(context.params["language_model"].extra_args)
        images = self._images_of(request, is_drawn="latents" in wanted)
        step_tokens = tokens_of_a_step(config.scheduler_config)
        for image in images:
            if (size := image.end - image.start) > step_tokens:
                said = f"its {size} tokens are computed in one step, which has at most {step_tokens}"
                raise InvalidRequest(f"an image of the prompt is too large: {said} (max_num_batched_tokens)")
        if "latents" not in wanted:
            return {}
        check_sampling(context.params["language_model"], "logprobs")
        ids: list[int] = request.prompt["prompt_token_ids"]
        thinks = ids[-1] == self.text_start
        num_tokens = len(ids) - thinks  # without the marker with which the model's own text starts
        starts = (index for index, token in enumerate(ids[:num_tokens]) if token == self.text_start)
        last_text = max(starts, default=0)
        if images and images[-1].start > last_text:
            last_text = num_tokens  # no text behind the last image is left out
        plan = ImagePlan(
            self._grid(given, ids, images),
            given.num_inference_steps,
            given.shift,
            context.params["language_model"].seed if given.seed is None else given.seed,
            guidance=given.guidance,
            progress=given.progress,
            preview_every=given.preview_every,
            negative=self._text(given.negative_prompt) if given.negative_prompt else (),
            without_text=((0, last_text),) if last_text else (),
            without_images=tuple(ranges_without(num_tokens, images)),
            end_of_text=self.text_end if thinks else None,
        )
        plan.check_fits(len(ids), step_tokens, config.model_config.max_model_len)
        return {PICTURE: msgspec.to_builtins(plan)}

    def _text(self, text: str) -> tuple[int, ...]:
        return (self.text_start, *self.tokenizer.encode(text, add_special_tokens=False), self.text_end)

    def _grid(self, given: ImageParams, ids: list[int], images: list[Span]) -> tuple[int, int]:
        """Rows and columns of the picture's tokens: of the size given, or of the prompt's last image.

        Raises:
            InvalidRequest: the size is no multiple of a token's, or larger than the model's largest.
        """
        if given.height is None and given.width is None and images:
            latents = [one for one in images if one.is_latent][-1]
            return self.image_ids.grid_of(ids[latents.start : latents.end])
        longest = self.max_latent_size * PIXELS_PER_TOKEN
        sides = []
        for name, value in (("height", given.height), ("width", given.width)):
            side = min(DEFAULT_SIDE, longest) if value is None else value
            if side % PIXELS_PER_TOKEN or not PIXELS_PER_TOKEN <= side <= longest:
                nearest = min(max(round(side / PIXELS_PER_TOKEN), 1) * PIXELS_PER_TOKEN, longest)
                said = f"must be a multiple of {PIXELS_PER_TOKEN} up to {longest}; the nearest is {nearest}"
                raise InvalidRequest(f"{name} = {side}: {said}", param="size")
            sides.append(side // PIXELS_PER_TOKEN)
        return sides[0], sides[1]

    @staticmethod
    def _images_of(request: StageRequest, *, is_drawn: bool) -> list[Span]:
        """The spans of the prompt's images.

        Raises:
            InvalidRequest: an image has no latents.
        """
        placeholders = (request.prompt.get("mm_placeholders") or {}).get("image", ())
        spans = [spans_of_placeholder(one) for one in placeholders]
        if is_drawn and any(len(each) == 1 for each in spans):
            said = f"give mm_processor_kwargs={{{IS_DRAWN!r}: True}} with the images of a prompt"
            raise InvalidRequest(f"the answer is a picture, which reads the latents of images: {said}")
        return [span for each in spans for span in each]

    async def latents_to_decoder(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Let the decoder have a picture when it is complete, and previews and progress before."""
        output_type = params_of(call.context.params["language_model"].extra_args).output_type
        async for chunk in chunks:
            output: StageOutput | None = chunk.payload
            for payload in output.payloads if output is not None else ():
                args = {"payloads": [encode(payload)], "output_type": output_type}
                yield Chunk(StageRequest(tokens_input([0]), args), last=STEP not in payload.values)
