"""Diffusion stages with real engines, against diffusers alone: one executor of each kind, one modality of each kind.

Qwen-Image runs in ``DiffusersPipelineExecutor``, Wan2.2 in a worker of the engine core's process, Stable Audio in a
worker process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor

from tests.shared_engines import QWEN_IMAGE, STABLE_AUDIO, SharedEngines, on_the_loop_of
from vllm_omni import AsyncOmni, OmniLLM
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import CallAborted, InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import diffusion as tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]

# For values in [0, 1]: a batch has other shapes, so float32 sums are taken in another order.
TOLERANCE = 1e-5

Reference = Callable[..., Tensor]


def load_reference(path: Path) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(path, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@asynccontextmanager
async def started(path: Path, **options: Any) -> AsyncIterator[AsyncOmni]:
    omni = await asyncio.to_thread(lambda: AsyncOmni(path, **options))
    try:
        yield omni
    finally:
        await omni.aclose()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("diffusers")

    def build(name: str) -> Path:
        path = directory / name
        return path if path.exists() else tiny.build(path, name)

    return build


async def outputs_of(
    omni: AsyncOmni, prompt: Any, request_id: str | None = None, **params: Any
) -> list[OmniRequestOutput]:
    return [one async for one in omni.generate(prompt, DiffusionParams(**params), request_id)]


async def answer(omni: AsyncOmni, prompt: Any, **params: Any) -> dict[str, Any]:
    """The media of the last output, as floats, which can be compared."""
    last = (await outputs_of(omni, prompt, **{"output_type": "float", **params}))[-1]
    assert last.finished
    return last.multimodal_output


async def widths(omni: AsyncOmni) -> dict[int, int]:
    """Requests in a forward -> such forwards so far."""
    (statistics,) = await omni.collective_rpc("diffusion_statistics")
    return {int(width): count for width, count in statistics["widths"].items()}


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.float() - theirs.float()).abs().max())


# -- images: Qwen-Image, no workers -----------------------------------------------------------------------------------

SIZE = {"height": 64, "width": 64}


@pytest.fixture
def image_omni(engines: SharedEngines) -> OmniLLM:
    return engines.get(QWEN_IMAGE)


@pytest.fixture(scope="module")
def image_pipeline(shared_engines: SharedEngines) -> Any:
    return load_reference(shared_engines.directory(QWEN_IMAGE) / "checkpoint")


@pytest.fixture(scope="module")
def image_reference(image_pipeline: Any) -> Reference:
    def make(prompt: str, *, seed: int, **kwargs: Any) -> Tensor:
        """[N, H, W, 3] in [0, 1]"""
        generator = torch.Generator().manual_seed(seed)
        images = image_pipeline(prompt=prompt, generator=generator, output_type="pt", **{**SIZE, **kwargs}).images
        return images.permute(0, 2, 3, 1)

    return make


# Prompts, lengths, steps and guidance differ.
MIXED: list[tuple[str, dict[str, Any]]] = [
    ("a red cat", {"seed": 1, "num_inference_steps": 6}),
    ("a big dog", {"seed": 2, "num_inference_steps": 4, "negative_prompt": "grey", "true_cfg_scale": 4.0}),
    ("a lake between two mountains, oil on canvas", {"seed": 3, "num_inference_steps": 5}),
    ("a tram", {"seed": 4, "num_inference_steps": 3, "negative_prompt": "blurred, dark", "true_cfg_scale": 1.5}),
]


@on_the_loop_of("image_omni")
async def test_an_image_is_the_one_that_diffusers_makes(image_omni: AsyncOmni, image_reference: Reference) -> None:
    prompt, params = MIXED[1]
    images = (await answer(image_omni, prompt, **SIZE, **params))["images"]
    assert difference(images, image_reference(prompt, **params)) < TOLERANCE


@on_the_loop_of("image_omni")
async def test_the_pixels_are_those_floats_rounded(image_omni: AsyncOmni, image_reference: Reference) -> None:
    prompt, params = MIXED[0]
    images = (await answer(image_omni, prompt, **SIZE, **params, output_type="media"))["images"]
    assert images.dtype == torch.uint8
    assert difference(images, image_reference(prompt, **params) * 255) < 0.5 + 255 * TOLERANCE


@on_the_loop_of("image_omni")
async def test_the_same_request_twice_is_bitwise_the_same(image_omni: AsyncOmni) -> None:
    prompt, params = MIXED[2]
    first, second = [(await answer(image_omni, prompt, **SIZE, **params))["images"] for _ in range(2)]
    assert torch.equal(first, second)


@on_the_loop_of("image_omni")
async def test_requests_that_join_a_batch_one_by_one_get_what_they_get_alone(
    image_omni: AsyncOmni, image_reference: Reference
) -> None:
    before = await widths(image_omni)

    async def join(index: int) -> Tensor:
        prompt, params = MIXED[index]
        outputs = image_omni.generate(prompt, DiffusionParams(**SIZE, **params, output_type="float", progress=True))
        has_started = False
        async for output in outputs:
            if not has_started:  # the next request arrives after a step of this one
                has_started = True
                if index + 1 < len(MIXED):
                    others.append(asyncio.create_task(join(index + 1)))
            last = output
        return last.multimodal_output["images"]

    others: list[asyncio.Task[Tensor]] = []
    images = [await join(0)]
    while len(images) < len(MIXED):
        images.append(await others[len(images) - 1])
    for (prompt, params), ours in zip(MIXED, images, strict=True):
        assert difference(ours, image_reference(prompt, **params)) < TOLERANCE, prompt
    after = await widths(image_omni)
    shared = {width for width in after if width > 1 and after[width] > before.get(width, 0)}
    assert shared, f"no forward was shared: {before} -> {after}"


@on_the_loop_of("image_omni")
async def test_requests_of_several_sizes_are_served_together(image_omni: AsyncOmni, image_reference: Reference) -> None:
    sizes = [(64, 64), (32, 64), (64, 64), (96, 32)]
    params = [{"height": height, "width": width, "num_inference_steps": 3} for height, width in sizes]
    answers = await asyncio.gather(
        *(answer(image_omni, "a red cat", **one, seed=seed) for seed, one in enumerate(params))
    )
    for seed, (one, ours) in enumerate(zip(params, answers, strict=True)):
        assert difference(ours["images"], image_reference("a red cat", **one, seed=seed)) < TOLERANCE, one


@on_the_loop_of("image_omni")
async def test_a_cached_image_is_the_one_that_diffusers_makes_with_its_own_cache(
    image_omni: AsyncOmni, image_pipeline: Any, image_reference: Reference
) -> None:
    prompt, params = MIXED[1]
    params = {**params, "num_inference_steps": 10}
    threshold = 0.9  # reuses some steps, and as ours never does neither the last one nor four in a row
    (before,) = await image_omni.collective_rpc("diffusion_statistics")
    cached, plain = await asyncio.gather(
        answer(image_omni, prompt, **SIZE, **params, cache_threshold=threshold),
        answer(image_omni, prompt, **SIZE, **params),
    )
    (after,) = await image_omni.collective_rpc("diffusion_statistics")
    image_pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        alone = image_reference(prompt, **params)
    finally:
        image_pipeline.transformer.disable_cache()
    assert difference(cached["images"], alone) < TOLERANCE
    assert difference(plain["images"], image_reference(prompt, **params)) < TOLERANCE
    assert difference(cached["images"], plain["images"]) > 1000 * TOLERANCE
    assert after["num_rows_reused"] > before["num_rows_reused"]


@on_the_loop_of("image_omni")
async def test_output_i_of_several_has_seed_plus_i(image_omni: AsyncOmni, image_reference: Reference) -> None:
    images = (await answer(image_omni, "a red cat", **SIZE, num_inference_steps=3, seed=7, num_outputs_per_prompt=3))[
        "images"
    ]
    for index, image in enumerate(images):
        alone = image_reference("a red cat", num_inference_steps=3, seed=7 + index)
        assert difference(image[None], alone) < TOLERANCE, index


@on_the_loop_of("image_omni")
async def test_fields_by_name_are_parameters_too(image_omni: AsyncOmni, image_reference: Reference) -> None:
    fields = {**SIZE, "num_inference_steps": 2, "seed": 5, "output_type": "float"}
    outputs = [one async for one in image_omni.generate("a red cat", fields)]
    alone = image_reference("a red cat", num_inference_steps=2, seed=5)
    assert difference(outputs[-1].multimodal_output["images"], alone) < TOLERANCE


@on_the_loop_of("image_omni")
async def test_latents_come_as_the_pipeline_has_them(image_omni: AsyncOmni) -> None:
    output = await answer(image_omni, "a red cat", **SIZE, num_inference_steps=2, seed=1, output_type="latents")
    assert output["latents"].dtype == torch.float32
    assert "images" not in output


@on_the_loop_of("image_omni")
async def test_progress_is_reported_where_it_is_requested(image_omni: AsyncOmni) -> None:
    params = {"seed": 2, "num_inference_steps": 60}
    reported, silent = await asyncio.gather(
        outputs_of(image_omni, "a big dog", **SIZE, **params, progress=True),
        outputs_of(image_omni, "a big dog", **SIZE, **params),
    )
    steps = [one.multimodal_output["step"] for one in reported]
    # Each step is reported once; a reader slower than the engine finds several steps merged into one report.
    assert len(steps) > 1 and steps == sorted(set(steps)) and steps[-1] == 60
    assert {one.multimodal_output["num_steps"] for one in reported} == {60}
    assert [one.finished for one in reported] == [False] * (len(reported) - 1) + [True]
    assert [one.finished for one in silent] == [True]


@on_the_loop_of("image_omni")
async def test_the_start_is_reported_where_it_is_requested(image_omni: AsyncOmni) -> None:
    outputs = await outputs_of(image_omni, "a big dog", **SIZE, seed=2, num_inference_steps=60, notify_start=True)
    assert [(one.multimodal_output["step"], one.finished) for one in outputs] == [(0, False), (60, True)]
    with pytest.raises(InvalidRequest, match="must be a multiple of"):
        await outputs_of(image_omni, "a dog", height=63, width=64, notify_start=True)


@on_the_loop_of("image_omni")
async def test_a_preview_comes_every_so_many_steps(image_omni: AsyncOmni) -> None:
    outputs = await outputs_of(image_omni, "a red cat", **SIZE, num_inference_steps=61, seed=1, preview_every=2)
    previews = {one.multimodal_output["step"]: one.multimodal_output["preview"] for one in outputs[:-1]}
    assert previews and all(step % 2 == 0 for step in previews)
    assert {(preview.dtype, tuple(preview.shape)) for preview in previews.values()} == {(torch.uint8, (64, 64, 3))}


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ("a cat", {"num_inference_steps": 0}, "num_inference_steps = 0: must be at least 1"),
    ("a cat", {"height": -64}, "height = -64: must be at least 1 pixel"),
    ("a cat", {"height": 512, "width": 512}, "at most 65536"),
    ("a cat", {"guidance_scale_2": 2.0}, "QwenImagePipeline takes no guidance_scale_2"),
    ("a cat", {"extra_args": {"max_sequence_length": 5000}}, "max_sequence_length"),
    ({"prompt": "a cat", "multi_modal_data": {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}}, {}, "image"),
    ({"prompt_token_ids": [1, 2]}, {}, "give a text"),
    (17, {}, "must be a text"),
]


@on_the_loop_of("image_omni")
async def test_a_bad_request_fails_alone_with_a_reason(image_omni: AsyncOmni, image_reference: Reference) -> None:
    expected = image_reference(MIXED[0][0], **MIXED[0][1])
    for prompt, params, reason in BAD_REQUESTS:
        good, bad = await asyncio.gather(
            answer(image_omni, MIXED[0][0], **SIZE, **MIXED[0][1]),
            answer(image_omni, prompt, **{**SIZE, **params}),
            return_exceptions=True,
        )
        assert isinstance(bad, InvalidRequest), reason
        assert reason in str(bad)
        assert isinstance(good, dict), reason
        assert difference(good["images"], expected) < TOLERANCE, reason


@on_the_loop_of("image_omni")
async def test_an_urgent_request_ends_before_those_that_arrived_first(image_omni: AsyncOmni) -> None:
    ended: list[int] = []

    async def ask(number: int, priority: int) -> None:
        params = DiffusionParams(**SIZE, num_inference_steps=20, seed=number)
        async for _ in image_omni.generate("a red cat", params, priority=priority):
            pass
        ended.append(number)

    num_others = 12  # of which eight share a batch
    tasks = [asyncio.create_task(ask(number, 0)) for number in range(num_others)]
    await asyncio.gather(*tasks, ask(num_others, -1))
    assert ended.index(num_others) <= 8


@pytest.mark.parametrize("num_steps_before", [0, 1, 3])
@on_the_loop_of("image_omni")
async def test_an_abort_ends_one_request_alone(
    image_omni: AsyncOmni, image_reference: Reference, num_steps_before: int
) -> None:
    async def aborted() -> int:
        """Steps that were reported before the request ended."""
        num_steps = 0
        params = DiffusionParams(**SIZE, num_inference_steps=900, seed=1, progress=True)
        outputs = image_omni.generate("a red cat", params, "to-abort")
        reader = asyncio.create_task(anext(outputs))
        if not num_steps_before:
            await asyncio.sleep(0)  # the request has been sent, and may be anywhere
            await image_omni.abort("to-abort")
        with pytest.raises(CallAborted):
            while True:
                output = await reader
                num_steps = output.multimodal_output["step"]
                if num_steps >= num_steps_before:
                    await image_omni.abort("to-abort")
                reader = asyncio.create_task(anext(outputs))
        return num_steps

    prompt, params = MIXED[1]
    num_steps, other = await asyncio.gather(aborted(), answer(image_omni, prompt, **SIZE, **params))
    assert num_steps < 900
    assert difference(other["images"], image_reference(prompt, **params)) < TOLERANCE
    # Neither the runner nor the relay holds anything of the request.
    (statistics,) = await image_omni.collective_rpc("diffusion_statistics")
    assert statistics["num_requests"] == 0
    (relays,) = await image_omni.collective_rpc("relay_statistics")
    assert all(relay["num_leases"] == 0 for relay in relays.values())


@pytest.mark.parametrize("level", [1, 2])
@on_the_loop_of("image_omni")
async def test_a_request_resumes_after_a_sleep_at_its_step(
    image_omni: AsyncOmni, image_reference: Reference, level: int
) -> None:
    params = {"seed": 9, "num_inference_steps": 40}
    outputs = image_omni.generate("a red cat", DiffusionParams(**SIZE, **params, output_type="float", progress=True))
    first = await anext(outputs)
    assert not first.finished
    await image_omni.sleep(level, mode="keep")
    assert await image_omni.is_sleeping()
    assert await image_omni.wake_up()
    async for output in outputs:
        last = output
    assert difference(last.multimodal_output["images"], image_reference("a red cat", **params)) < TOLERANCE


# -- video: Wan2.2, in a worker of the engine core's process ----------------------------------------------------------

CLIP = {"height": 32, "width": 32, "num_frames": 9}


@pytest.fixture(scope="module")
async def video_omni(checkpoints: Callable[[str], Path]) -> AsyncIterator[AsyncOmni]:
    uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    async with started(checkpoints("wan2.2-t2v"), stage_overrides=[f"diffusion.executor_class={uniproc}"]) as omni:
        yield omni


@pytest.fixture(scope="module")
def video_reference(checkpoints: Callable[[str], Path]) -> Reference:
    pipeline = load_reference(checkpoints("wan2.2-t2v"))

    def make(prompt: str, *, seed: int, **kwargs: Any) -> Tensor:
        """[N, T, H, W, 3] in [0, 1]"""
        generator = torch.Generator().manual_seed(seed)
        frames = pipeline(prompt=prompt, generator=generator, output_type="pt", **CLIP, **kwargs).frames
        return frames.permute(0, 1, 3, 4, 2)

    return make


@pytest.mark.long
async def test_videos_of_both_experts_in_one_batch_are_those_of_diffusers(
    video_omni: AsyncOmni, video_reference: Reference
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("a cat walks", {"seed": 1, "num_inference_steps": 6}),
        ("a boat", {"seed": 2, "num_inference_steps": 3, "guidance_scale": 1.0}),
        ("rain on a window", {"seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "guidance_scale_2": 2.0}),
    ]
    answers = await asyncio.gather(*(answer(video_omni, prompt, **CLIP, **params) for prompt, params in requests))
    for (prompt, params), ours in zip(requests, answers, strict=True):
        assert difference(ours["frames"], video_reference(prompt, **params)) < TOLERANCE, prompt
    assert max(await widths(video_omni)) > 1


@pytest.mark.long
async def test_a_video_can_be_aborted_in_a_worker(video_omni: AsyncOmni) -> None:
    params = DiffusionParams(**CLIP, num_inference_steps=900, progress=True)
    outputs = video_omni.generate("a cat walks", params, "to-abort")
    await anext(outputs)
    await video_omni.abort("to-abort")
    with pytest.raises(CallAborted):
        async for _ in outputs:
            pass
    (statistics,) = await video_omni.collective_rpc("diffusion_statistics")
    assert statistics["num_requests"] == 0


# -- sound: Stable Audio, in a worker process -------------------------------------------------------------------------


@pytest.fixture
def audio_omni(engines: SharedEngines) -> OmniLLM:
    return engines.get(STABLE_AUDIO)


@pytest.mark.long
@on_the_loop_of("audio_omni")
async def test_sounds_of_a_batch_equal_diffusers_and_a_bad_request_stops_no_worker(
    audio_omni: AsyncOmni, engines: SharedEngines
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("a dog barks", {"seed": 1, "num_inference_steps": 5}),
        ("rain on a roof, far away", {"seed": 2, "num_inference_steps": 3, "guidance_scale": 3.0}),
        ("a tram", {"seed": 3, "num_inference_steps": 4, "negative_prompt": "hiss"}),
    ]
    bad, *sounds = await asyncio.gather(
        answer(audio_omni, "rain", extra_args={"audio_end_in_s": -1.0}, num_inference_steps=3),
        *(answer(audio_omni, prompt, **params) for prompt, params in requests),
        return_exceptions=True,
    )
    assert isinstance(bad, InvalidRequest)
    pipeline = load_reference(engines.directory(STABLE_AUDIO) / "checkpoint")
    for (prompt, params), sound in zip(requests, sounds, strict=True):
        assert isinstance(sound, dict)
        generator = torch.Generator().manual_seed(params.pop("seed"))
        alone = pipeline(prompt, **params, generator=generator, output_type="pt").audios
        assert difference(sound["audio"], alone) < TOLERANCE, prompt
        assert sound["sample_rate"] == pipeline.vae.sampling_rate
    assert max(await widths(audio_omni)) > 1
