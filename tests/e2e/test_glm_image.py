"""GLM-Image served through the graph, held against diffusers' own pipeline on the same weights, noise and greedy codes.

Tolerances, in float32: latents 1e-5 of their maximum.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from vllm.v1.engine.core import EngineCoreProc

from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.reference.glm_image import Reference
from tests.reference.media import make_image
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing.glm_image import build

pytestmark = MARKS

LATENTS = 1e-5  # of the maximum
DEPLOYMENTS: dict[str, tuple[str, list[str]]] = {
    "base": ("base", ["language_model.kv_cache_memory_bytes=16777216"]),
    # Room for a few sequences, which it must preempt.
    "narrow": (
        "deep",
        ["language_model.block_size=32", "language_model.num_gpu_blocks_override=25", "diffusion.max_num_seqs=2"],
    ),
}


@dataclass
class Case:
    """A request."""

    name: str
    prompt: str
    params: dict[str, Any]
    images: list[Image.Image] = field(default_factory=list)


CASES = [
    Case("wide", "a small red boat, 'SEA' on it", {"width": 96, "height": 64, "seed": 1}),
    Case("tall", "two houses", {"width": 64, "height": 128, "seed": 2, "num_inference_steps": 5}),
    Case("unguided", "「A」 and “B”", {"width": 64, "height": 64, "seed": 3, "guidance_scale": 1.0}),
    Case("edit", "paint it blue", {"width": 96, "height": 64, "seed": 4}, [make_image(96, 64)]),
    Case("resized", "a larger boat", {"width": 64, "height": 160, "seed": 5}, [make_image(64, 96, seed=1)]),
    Case(
        "several",
        "the first in the second's colour",
        {"width": 96, "height": 96, "seed": 6, "guidance_scale": 3.0},
        [make_image(64, 96, seed=2), make_image(128, 96, seed=3)],
    ),
]
NUM_STEPS = 4
DEFAULTS = {"num_inference_steps": NUM_STEPS, "output_type": "latents"}


class Served(NamedTuple):
    name: str
    omni: AsyncOmni
    expected: dict[str, torch.Tensor]

    def core(self, stage: str) -> EngineCoreProc:
        core = thread_of(self.omni.orchestrator.front(stage)).core
        assert core is not None
        return core

    def check(self, case: Case, output: OmniRequestOutput) -> None:
        latents, expected = output.multimodal_output["latents"], self.expected[case.name]
        assert latents.shape == expected.shape, case.name
        difference = (latents - expected).abs().max() / expected.abs().max()
        assert difference < LATENTS, f"{case.name}: {difference:.1e}"


@pytest.fixture(scope="module", params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("narrow",))])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variant, overrides = DEPLOYMENTS[request.param]
    path = build(tmp_path_factory.mktemp(request.param), variant=variant)
    reference = Reference(path)
    expected = {
        case.name: reference.latents(case.prompt, case.images, **{"num_inference_steps": NUM_STEPS, **case.params})
        for case in CASES
    }
    with engine_threads():
        engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 384, "max_num_batched_tokens": 64}
        given = [f"language_model.{name}={value}" for name, value in engine.items()]
        omni = AsyncOmni(path, stage_overrides=[*given, *overrides])
        yield Served(request.param, omni, expected)
        omni.shutdown()


async def ask(served: Served, case: Case, *, greedy: bool = True, **params: Any) -> OmniRequestOutput:
    prompt = {"prompt": case.prompt, "multi_modal_data": {"image": case.images}}
    of_stages = {"diffusion": {**DEFAULTS, **case.params, **params}}
    if greedy:
        of_stages["language_model"] = {"temperature": 0.0}
    return await asyncio.wait_for(collect(served.omni.generate(prompt, of_stages)), 60)


async def until_idle(served: Served) -> None:
    for stage in ("language_model", "diffusion"):
        scheduler: Any = served.core(stage).scheduler
        for _ in range(2000):
            if not scheduler.requests:
                break
            await asyncio.sleep(0.01)
        assert not scheduler.requests, stage
    assert served.core("language_model").scheduler.kv_cache_manager.usage == 0.0
    for stage in ("language_model", "diffusion"):
        for statistics in await served.omni.orchestrator.front(stage).relay_statistics():
            assert not any(one["num_leases"] for one in statistics.values()), statistics


async def test_each_case_alone_is_as_the_reference(served: Served) -> None:
    for case in CASES:
        served.check(case, await ask(served, case))
    await until_idle(served)


async def test_a_batch_is_as_the_reference(served: Served) -> None:
    for _ in range(BATCHES):
        outputs = await asyncio.gather(*(ask(served, case) for case in 2 * CASES))
        for case, output in zip(2 * CASES, outputs, strict=True):
            served.check(case, output)
        await until_idle(served)
        if served.name != "narrow" or num_preemptions(served.omni.orchestrator.front("language_model")):
            break
    else:
        raise AssertionError("nothing was preempted")


async def test_an_abort_leaves_nothing_and_the_others_end(served: Served) -> None:
    tasks = [asyncio.create_task(ask(served, case)) for case in 2 * CASES]
    for index, task in enumerate(tasks[::3]):
        await asyncio.sleep(0.1 * index)
        task.cancel()
    outputs = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(output, asyncio.CancelledError) for output in outputs) > 1
    for case, output in zip(2 * CASES, outputs, strict=True):
        if not isinstance(output, BaseException):
            served.check(case, output)
        else:
            assert isinstance(output, asyncio.CancelledError)
    await until_idle(served)


async def test_requests_share_calls_of_the_transformer(served: Served) -> None:
    (case,) = (case for case in CASES if case.name == "tall")
    engine = served.omni.orchestrator.front("diffusion")
    (before,) = await engine.llm.collective_rpc("diffusion_statistics")
    await asyncio.gather(*(ask(served, case, seed=seed, num_inference_steps=30) for seed in (1, 2)))
    (after,) = await engine.llm.collective_rpc("diffusion_statistics")
    assert after["widths"].get(2, 0) > before["widths"].get(2, 0)


async def test_the_seed_of_a_request_is_that_of_its_codes(served: Served) -> None:
    (case,) = (case for case in CASES if case.name == "tall")
    first, second, other = [
        (await ask(served, case, greedy=False, seed=seed)).multimodal_output["latents"] for seed in (7, 7, 8)
    ]
    assert torch.equal(first, second)
    assert not torch.allclose(first, other, atol=0.1)


async def test_outputs_of_one_request_have_the_same_codes_and_their_own_noise(served: Served) -> None:
    (case,) = (case for case in CASES if case.name == "wide")
    latents = (await ask(served, case, num_outputs_per_prompt=2)).multimodal_output["latents"]
    next_seed = (await ask(served, case, seed=2)).multimodal_output["latents"]
    served.check(case, output_of(latents[:1]))
    assert (latents[1:] - next_seed).abs().max() < LATENTS * next_seed.abs().max()


def output_of(latents: torch.Tensor) -> Any:
    return SimpleNamespace(multimodal_output={"latents": latents})


async def test_an_image_that_does_not_fit_is_resized(served: Served) -> None:
    image = make_image(75, 50)
    case = Case("", "paint it", {"seed": 1}, [image])
    output = await ask(served, case, output_type="media")
    assert output.images[0].size == (96, 64), "the picture has the size of the image"
    resized = Case("", "paint it", {"seed": 1}, [image.resize((96, 64), Image.Resampling.LANCZOS)])
    assert output.images[0] == (await ask(served, resized, output_type="media")).images[0]


REJECTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"height": 72}, "height = 72: must be a multiple of 32; the nearest are 64 and 96"),
    ({}, {"width": 16}, "width = 16: must be a multiple of 32"),
    ({}, {"height": 32, "width": 32 * 65}, "one side must be at most 64 times the other"),
    ({}, {"height": 512, "width": 512}, "and the picture 513: together at most 384; choose a smaller size"),
    ({}, {"negative_prompt": "blurred"}, "this model has no negative_prompt"),
    ({}, {"num_inference_steps": 1001}, "num_inference_steps = 1001: at most 1000"),
    ({"prompt": "a <|image|> b"}, {}, "tokens that stand for images"),
    ({"prompt": "<|dit_token_3|>"}, {}, "tokens that stand for images"),
    ({"prompt": 7}, {}, "must be a text"),
    ({"multi_modal_data": {"image": [make_image(10, 64)]}}, {}, "image of 10 x 64 pixels"),
    ({"multi_modal_data": {"image": [make_image(32, 160)]}}, {}, "absolute aspect ratio must be smaller than 4"),
    ({"multi_modal_data": {"audio": [1]}}, {}, "this model reads images"),
]


async def test_codes_that_are_cut_off_fail_the_request_alone(served: Served) -> None:
    params = {"diffusion": {"height": 64, "width": 64}, "language_model": {"stop_token_ids": list(range(96))}}
    with pytest.raises(InvalidRequest, match="has read and written 0 codes instead of 260"):
        await collect(served.omni.generate("a", params))
    served.check(CASES[0], await ask(served, CASES[0]))


async def test_a_request_that_cannot_be_answered_is_rejected(served: Served) -> None:
    for prompt, params, said in REJECTED:
        given = {"prompt": "a", **prompt}
        with pytest.raises(InvalidRequest, match=said):
            await collect(served.omni.generate(given, {"diffusion": {"height": 64, "width": 64, **params}}))
    await until_idle(served)
