"""GLM-Image: language model -> diffusion. Requests are as to a diffusion pipeline: a text, images, ``DiffusionParams``.

The language model writes the codes of the picture and, without images, those of a small preview before them; a
diffusion transformer generates the picture from these codes and from the texts in quotes. The diffusion stage stands
first, as it is the one that a user's prompt and parameters are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from msgspec import structs
from PIL import Image
from transformers import GlmImageConfig, GlmImageProcessor, PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams

from vllm_omni.config.checkpoint import folder_of
from vllm_omni.config.diffusion_params import DiffusionParams, check_text
from vllm_omni.diffusion.reading import read_request
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import Activation, Chunk
from vllm_omni.messages.payload import ROWS
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.models.glm_image import language_model
from vllm_omni.model_executor.models.glm_image.decoder import decoder_hf_config
from vllm_omni.model_executor.models.glm_image.graph import build_graph
from vllm_omni.model_executor.models.glm_image.language_model import GRIDS
from vllm_omni.model_executor.models.glm_image.sizes import fit, num_codes, picture_size
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageRequest, StageSpec
from vllm_omni.model_executor.transfers import pass_tensors
from vllm_omni.names import suggest

LANGUAGE_MODEL = "vision_language_encoder"  # its folder in the checkpoint
NOT_READ = ("negative_prompt", "true_cfg_scale", "guidance_scale_2", "num_frames")
"""Fields of ``DiffusionParams`` that other pipelines have."""


class GlmImagePipeline(Pipeline):
    """A text and images in, a picture out."""

    modalities = {"image": "image"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        processor = folder_of(model, "processor", revision=revision)
        self.config = GlmImageConfig.from_pretrained(folder_of(model, LANGUAGE_MODEL, revision=revision))
        self.processor = GlmImageProcessor.from_pretrained(processor)
        self.graph = build_graph()
        self.stages = (
            diffusers_stage("diffusion", "image", combine={"generate": join}, hf_overrides=decoder_hf_config),
            StageSpec(
                "language_model",
                architecture=language_model.ARCHITECTURE,
                output_type="text",
                hf_overrides=language_model.language_hf_config,
                publishing_fields=frozenset({"codes"}),
                model_folder=LANGUAGE_MODEL,
                make_args=check_room,
                engine_args={
                    "tokenizer": processor,  # where vLLM's processor finds that of images
                    "skip_tokenizer_init": True,
                    "enable_prompt_embeds": False,
                    "enable_prefix_caching": False,  # what is published is computed
                    "speculative_config": None,
                    "async_scheduling": False,
                },
                sampling_params={"detokenize": False, "ignore_eos": True},
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: {suggest(name, ())}")
        return {}

    async def request_inputs(self, prompt: Any, context: RequestContext) -> Mapping[str, Any]:
        """The requests of both stages.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong.
        """
        given, sampling = context.params["diffusion"], context.params["language_model"]
        request = await asyncio.to_thread(self._read, prompt, given)  # it may decode and resize images
        height, width = picture_size(request.params.height, request.params.width, request.images)
        return {
            "prompt": StageRequest({"prompt": request.prompt, "multi_modal_data": {"image": request.images}}),
            "caption": self._caption(request, height, width, sampling),
        }

    def _read(self, prompt: Any, params: DiffusionParams) -> DiffusionRequest:
        request = read_request(prompt, params)
        check_text("prompt", request.prompt)
        for name in NOT_READ:
            if (value := getattr(request.params, name)) is not None:
                raise InvalidRequest(f"{name} = {value!r}: this model has no {name}; leave it out", param=name)
        images = [fit(image, self.processor.image_processor) for image in request.images]
        return structs.replace(request, images=images)

    def _caption(self, request: DiffusionRequest, height: int, width: int, sampling: SamplingParams) -> StageRequest:
        """The language model's request, by transformers' processor: the text with the picture's size behind it."""
        processor, images = self.processor, request.images
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": request.prompt}]
        chat = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        sizes = {"target_h": height, "target_w": width}
        _, (text,), *_ = processor.prepare_inputs_layout(images or None, [chat], images_kwargs=sizes)
        ids = self._ids(text, images)
        rows, columns, preview_rows, preview_columns = processor._get_target_shape(height, width)
        grids = [(rows, columns)] if images else [(rows, columns), (preview_rows, preview_columns)]
        # One more than it writes: rows are those of tokens that were read.
        params: dict[str, Any] = {"max_tokens": num_codes(grids) + 1}
        if sampling.seed is None:
            params["seed"] = request.params.seed
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}} if images else tokens_input(ids)
        return StageRequest(prompt, {GRIDS: grids}, params)

    def _ids(self, text: str, images: Sequence[Image.Image]) -> list[int]:
        """The ids of a text, as transformers' processor makes them.

        Raises:
            InvalidRequest: the user's text has tokens of images.
        """
        tokenizer = self.processor.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token))["input_ids"]
        of_images = [one for one in ids if one < self.config.text_config.vision_vocab_size]
        is_own = len(of_images) == 2 * len(images) + 1 and ids.count(self.config.image_token_id) == len(images)
        if not is_own:
            named = ", ".join(sorted({tokenizer.convert_ids_to_tokens(one) for one in of_images}))
            said = f"tokens that stand for images ({self.processor.image_token}, {named}) cannot be part of a text"
            raise InvalidRequest(f"prompt: {said}", param="prompt")
        return ids


def check_room(
    request: StageRequest, context: RequestContext, wanted: frozenset[str], config: VllmConfig
) -> dict[str, Any]:
    """No further arguments, if the language model has room for the request.

    Raises:
        InvalidRequest: it has not.
    """
    num_read, num_written = len(request.prompt["prompt_token_ids"]), request.sampling_params["max_tokens"]
    longest = config.model_config.max_model_len
    if num_read + num_written > longest:
        said = f"the prompt has {num_read} tokens, and the picture {num_written}: together at most {longest}"
        raise InvalidRequest(f"{said}; choose a smaller size, fewer images or a shorter text", param="height")
    return {}


async def join(activation: Activation) -> AsyncIterator[Chunk]:
    """The diffusion stage's request: the user's, when the codes are complete."""
    async for chunk in activation.inputs["prompt"]:
        async for request in pass_tensors(chunk.payload.prompt, tokens=ROWS)(activation.inputs["codes"]):
            yield request
