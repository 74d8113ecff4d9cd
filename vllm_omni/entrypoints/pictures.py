"""Requests for pictures that a language model denoises: their parameters, and several pictures of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.diffusion_request import read_request
from vllm_omni.engine.rendered_prompt import join_prompts
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.stage_params import diffusion_fields
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import Pipeline
from vllm_omni.unified.params import IMAGE, ImageParams, image_fields, params_of

Run = Callable[[Any, SamplingParams, str], AsyncGenerator[OmniRequestOutput, None]]


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


def one_each(params: SamplingParams, modalities: Collection[str], *, alternates: bool) -> list[SamplingParams]:
    """The parameters of each of a request's pictures.

    Args:
        alternates: whether the model's texts and pictures may alternate in an answer.

    Raises:
        InvalidRequest: they are wrong, or several pictures are asked for with a text.
    """
    given = params_of(params.extra_args)
    if given.num_outputs_per_prompt > 1 and list(modalities) != ["image"]:
        said = f"num_outputs_per_prompt = {given.num_outputs_per_prompt}"
        if not alternates or "image" not in modalities:
            instead = "give 1, or modalities ['image']"
            raise InvalidRequest(
                f"{said}: beside a text there is one picture; {instead}", param="num_outputs_per_prompt"
            )
        if given.output_type != "media":
            said = (
                f"output_type = {given.output_type!r}: the text behind a picture reads it; give 'media', or one picture"
            )
            raise InvalidRequest(said, param="output_type")
    each = []
    for index in range(given.num_outputs_per_prompt):
        fields = {**((params.extra_args or {}).get(IMAGE) or {}), "num_outputs_per_prompt": 1}
        if given.seed is not None:
            fields["seed"] = given.seed + index
        args = {**(params.extra_args or {}), IMAGE: fields}
        # The set of all stop ids is derived from the fields; a copy would share it.
        each.append(msgspec.structs.replace(params, extra_args=args, _all_stop_token_ids=set()))
    return each


async def alternate(
    run: Run, front: StageEngine, pipeline: Pipeline, prompt: Any, each: Sequence[SamplingParams], request_id: str
) -> AsyncGenerator[OmniRequestOutput, None]:
    """Generate a text and a picture, and again behind them, for each of a request's pictures; outputs are deltas.

    ``text_offsets`` in ``multimodal_output`` has for each picture the number of characters of the answer before it.

    Args:
        run: runs one request, of a prompt, parameters of the first stage, and an id.
        front: renders the prompts.
    """
    prompt, num_characters, whole_prompt = await front.render(prompt), 0, None
    for index, params in enumerate(each):
        is_last = index + 1 == len(each)
        ids: list[int] = []
        pictures: list[Any] = []
        deltas = params.clone()
        deltas.output_kind = RequestOutputKind.DELTA
        async with aclosing(run(prompt, deltas, f"{request_id}-{index}")) as outputs:
            async for output in outputs:
                output.request_id, output.finished = request_id, output.finished and is_last
                whole_prompt = output.prompt_token_ids = whole_prompt or output.prompt_token_ids
                for completion in output.outputs:
                    ids += completion.token_ids
                    num_characters += len(completion.text)
                    if not is_last:
                        completion.finish_reason = completion.stop_reason = None
                if output.images:
                    pictures += output.images
                    output.multimodal_output["text_offsets"] = [num_characters] * len(output.images)
                yield output
        if not is_last:
            text, behind = pipeline.continue_answer(ids, pictures[0])
            prompt = join_prompts(prompt, text, await front.render(behind))


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
