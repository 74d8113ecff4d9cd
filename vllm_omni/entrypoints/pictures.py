"""Requests for pictures that a language model denoises: their parameters, and several pictures of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.diffusion_request import read_request
from vllm_omni.entrypoints.stage_params import diffusion_fields
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import Pipeline
from vllm_omni.unified.params import IMAGE, ImageParams, image_fields, params_of


def picture_args(diffusion: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that ask for a picture, from fields of ``DiffusionParams``.

    Raises:
        InvalidRequest: a field has no effect here, or a wrong value.
    """
    fields = image_fields(diffusion)
    ImageParams.of(fields)
    return {"extra_args": {IMAGE: fields}}


def read_picture_request(pipeline: Pipeline, prompt: Any, params: DiffusionParams) -> tuple[Any, dict[str, Any]]:
    """A request in the form of those to diffusion pipelines, as a prompt and sampling parameters of the first stage.

    Raises:
        InvalidRequest: the prompt is not a text with or without images, or a parameter is wrong.
    """
    request = read_request(prompt, params)
    fields = diffusion_fields(pipeline.stages[0].name, request.params)
    return pipeline.picture_prompt(request.prompt, request.images), picture_args(fields)


def one_each(params: SamplingParams, modalities: Collection[str]) -> list[SamplingParams]:
    """The parameters of each of a request's pictures.

    Raises:
        InvalidRequest: they are wrong, or several pictures are asked for with a text.
    """
    given = params_of(params.extra_args)
    if given.num_outputs_per_prompt > 1 and list(modalities) != ["image"]:
        said = f"num_outputs_per_prompt = {given.num_outputs_per_prompt}: beside a text there is one picture"
        raise InvalidRequest(f"{said}; give 1, or modalities ['image']", param="num_outputs_per_prompt")
    each = []
    for index in range(given.num_outputs_per_prompt):
        fields = {**((params.extra_args or {}).get(IMAGE) or {}), "num_outputs_per_prompt": 1}
        if given.seed is not None:
            fields["seed"] = given.seed + index
        args = {**(params.extra_args or {}), IMAGE: fields}
        # The set of all stop ids is derived from the fields; a copy would share it.
        each.append(msgspec.structs.replace(params, extra_args=args, _all_stop_token_ids=set()))
    return each


async def join(
    streams: Iterable[AsyncGenerator[OmniRequestOutput, None]], request_id: str
) -> AsyncGenerator[OmniRequestOutput, None]:
    """Run several requests at once, and yield their answers in order, as the outputs of one request."""
    tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
    try:
        for index, task in enumerate(tasks):
            output = await task
            output.request_id, output.finished = request_id, index + 1 == len(tasks)
            yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
