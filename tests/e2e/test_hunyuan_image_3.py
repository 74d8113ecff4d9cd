"""HunyuanImage-3 served through the graph, held against a plain reference that is equal to the original code
(``tests/reference/hunyuan_image_3.py``), on the same weights and noise.

Tolerances, in float32: ids equal; latents 1e-5 of their maximum. The auto-encoder's posterior is its mean.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.reference.hunyuan_image_3 import NUM_RATIOS, Grid, Reference, Row
from tests.reference.media import make_image
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing.hunyuan_image_3 import build

pytestmark = MARKS

LATENTS = 1e-5  # of the maximum
MAX_TOKENS = 16
SHIFT, GUIDANCE, NUM_STEPS = 3.0, 2.5, 4  # of the checkpoint

# Variant, its seed, settings. The seeds are of checkpoints that choose several sizes.
DEPLOYMENTS: dict[str, tuple[str, int, list[str]]] = {
    "base": ("base", 0, ["language_model.max_num_batched_tokens=64"]),
    # Room for a few sequences, which it must preempt; a step holds two canvases.
    "narrow": (
        "deep",
        5,
        [
            "language_model.block_size=32",
            "language_model.max_model_len=256",
            "language_model.num_gpu_blocks_override=13",
            "language_model.max_num_batched_tokens=64",
            "language_model.enable_prefix_caching=false",
        ],
    ),
    "one": ("base", 0, ["language_model.max_num_seqs=1", "language_model.max_num_batched_tokens=64"]),
}

Part = str | Image.Image


@dataclass
class Case:
    """A request: what the user gives, and what is asked for."""

    name: str
    parts: list[Part]
    picture: dict[str, Any] | None = None  # None: an answer in text
    task: str | None = None  # a text that the model writes in front of the picture
    system: str = ""
    shape: int | None = None  # of the picture; None: the model chooses
    has_roles: bool = True

    @property
    def prompt(self) -> dict[str, Any]:
        text = "".join(part if isinstance(part, str) else "<img>" for part in self.parts)
        if self.has_roles:
            system = f"{self.system}\n\n" if self.system else ""
            text = f"{system}User: {text}\n\nAssistant: {f'<{self.task}>' if self.task else ''}"
        prompt: dict[str, Any] = {"prompt": f"<|startoftext|>{text}"}
        if images := [part for part in self.parts if not isinstance(part, str)]:
            prompt["multi_modal_data"] = {"image": images}
        return prompt

    def params(self, reference: Reference) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        if self.picture is not None:
            size = {}
            if self.shape is not None:
                size["height"], size["width"] = reference.size_of(self.shape)
            params["extra_args"] = {"image": {"output_type": "latents", **size, **self.picture}}
        return {"language_model": params}


SQUARE = NUM_RATIOS // 2

CASES = [
    Case("plain", ["a small red boat"], {"guidance_scale": 1.0, "seed": 1}, shape=SQUARE, has_roles=False),
    Case("caption", ["two boats, one red"], {"seed": 2, "num_inference_steps": 5}, shape=4, has_roles=False),
    Case("guided", ["make the sky green"], {"guidance_scale": 5.0, "seed": 3}, shape=SQUARE + 9, system="You draw."),
    Case("chosen size", ["the lake"], {"seed": 4, "num_inference_steps": 3}),
    Case("another chosen size", ["what a house, with cats"], {"seed": 5, "num_inference_steps": 3}),
    Case("answer", ["how many cats are on the lake?"]),
    Case("seen", [make_image(61, 50), "what colour is the house?"]),
    Case("edit", [make_image(61, 50), "paint the boat blue"], {"seed": 6}, shape=SQUARE - 2),
    Case("recaption", ["paint the house"], {"seed": 7, "num_inference_steps": 3}, task="recaption", shape=SQUARE),
    Case("recaption, chosen size", ["the lake"], {"seed": 8, "num_inference_steps": 3}, task="recaption"),
    Case("think", ["what a house"], {"seed": 9, "num_inference_steps": 2, "shift": 2.0}, task="think", shape=32),
    Case("think, chosen size", ["a cat"], {"seed": 10, "num_inference_steps": 2}, task="think"),
    Case(
        "two images",
        [make_image(48, 90, seed=1), "the first", make_image(61, 50, seed=2), "in the second's colour"],
        {"seed": 11, "num_inference_steps": 3},
        shape=SQUARE + 3,
    ),
    Case("recaption of an image", [make_image(40, 64, seed=3), "a cat"], {"seed": 12}, task="recaption"),
]


class Expected(NamedTuple):
    ids: list[int]  # of the text
    latents: torch.Tensor | None
    grid: Grid | None


def expected_of(reference: Reference, case: Case) -> Expected:
    row, ids = reference.start(), list[int]()
    if case.system:
        for section in (case.system, "\n\n"):
            reference.add_text(row, section)
    if case.has_roles:
        reference.add_text(row, "User: ")
    for part in case.parts:
        if isinstance(part, str):
            reference.add_text(row, part, is_masked=True)
        else:
            reference.add_given(row, reference.read_image(part, None))
    if case.has_roles:
        for section in ("\n\n", "Assistant: "):
            reference.add_text(row, section)
    if case.picture is None:
        stops = [reference.eos, *range(reference.first_ratio, reference.first_ratio + NUM_RATIOS)]
        return Expected(reference.answer(row, stops, MAX_TOKENS)[0], None, None)
    if case.task is not None:
        ids = write(reference, row, case.task)
    if case.has_roles:
        reference.add_text(row, "<answer>")
    shape = case.shape
    if shape is None:
        opened = Row(list(row.ids), grids=row.grids, spans=row.spans, given=row.given)
        reference.add_text(opened, f"<boi><img_size_{reference.base_size}>")
        shape = reference.choose_ratio(opened)
    reference.add_canvas(row, shape)
    grid, given = reference.grid_of(shape), case.picture
    num_channels = reference.config["vae"]["latent_channels"]
    made = reference.denoise(
        row,
        torch.randn(num_channels, *grid, generator=torch.Generator().manual_seed(given["seed"])),
        num_steps=given.get("num_inference_steps", NUM_STEPS),
        shift=given.get("shift", SHIFT),
        scale=given.get("guidance_scale", GUIDANCE),
    )
    return Expected(ids, made.latents[-1], grid)


def write(reference: Reference, row: Row, task: str) -> list[int]:
    """Append a text in front of a picture; returns its ids, as they are served."""
    reference.add_text(row, f"<{task}>", is_masked=task == "think")
    end = reference.id_of("</recaption>")
    stops = [end, reference.id_of("</answer>"), reference.eos]
    ids, _ = reference.answer(row, stops, MAX_TOKENS)
    text = ids[:-1] if ids[-1] in stops else ids
    row.add(text, is_masked=True)
    if task == "recaption" or ids[-1] == end:
        row.add([end])
    is_cut = ids[-1] not in stops
    return ids if is_cut else [*text, row.ids[-1] if row.ids[-1] == end else reference.id_of("<answer>")]


class Served(NamedTuple):
    name: str
    omni: AsyncOmni
    reference: Reference
    expected: dict[str, Expected]

    @property
    def engine(self) -> StageEngine:
        return self.omni.orchestrator.front("language_model")

    @property
    def scheduler(self) -> Any:
        core = thread_of(self.engine).core
        assert core is not None
        return core.scheduler

    def check(self, case: Case, output: OmniRequestOutput) -> None:
        expected = self.expected[case.name]
        ids = list(output.outputs[0].token_ids) if output.outputs else []
        assert ids[: len(expected.ids)] == expected.ids, case.name
        if expected.latents is not None:
            latents = output.multimodal_output["latents"]
            assert latents.shape == (1, *expected.latents.shape), case.name
            difference = (latents[0] - expected.latents).abs().max() / expected.latents.abs().max()
            assert difference < LATENTS, f"{case.name}: {difference:.1e}"


@pytest.fixture(
    scope="module", params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("narrow", "one"))]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variant, seed, overrides = DEPLOYMENTS[request.param]
    path = build(tmp_path_factory.mktemp(request.param), variant=variant, seed=seed)
    reference = Reference(path)
    with torch.no_grad():
        expected = {case.name: expected_of(reference, case) for case in CASES}
    with engine_threads():
        engine = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
        given = [f"language_model.{name}={value}" for name, value in engine.items()]
        omni = AsyncOmni(path, stage_overrides=[*given, *overrides])
        yield Served(request.param, omni, reference, expected)
        omni.shutdown()


async def ask(served: Served, case: Case) -> OmniRequestOutput:
    modalities = ["text"] if case.picture is None else ["image"] if case.task is None else ["text", "image"]
    generated = served.omni.generate(case.prompt, case.params(served.reference), modalities=modalities)
    return await asyncio.wait_for(collect(generated), 60)


async def until_idle(served: Served) -> None:
    for _ in range(2000):
        if not served.scheduler.requests:
            break
        await asyncio.sleep(0.01)
    assert not served.scheduler.requests and not served.scheduler.canvases
    assert served.scheduler.kv_cache_manager.usage == 0.0


def test_the_cases_have_texts_of_several_ends_and_sizes_of_several_shapes(served: Served) -> None:
    end, answer = (served.reference.id_of(token) for token in ("</recaption>", "<answer>"))
    texts = [served.expected[case.name].ids for case in CASES if case.task is not None]
    last = {ids[-1] if ids[-1] in (end, answer) else None for ids in texts}
    assert len(last) > 1, last
    grids = {served.expected[case.name].grid for case in CASES if case.picture is not None and case.shape is None}
    assert len(grids) > 1, grids


async def test_each_case_alone_is_as_the_reference(served: Served) -> None:
    for case in CASES:
        served.check(case, await ask(served, case))
    await until_idle(served)


async def test_pictures_and_texts_of_one_batch_are_as_the_reference(served: Served) -> None:
    for _ in range(BATCHES):
        outputs = await asyncio.gather(*(ask(served, case) for case in 2 * CASES))
        for case, output in zip(2 * CASES, outputs, strict=True):
            served.check(case, output)
        await until_idle(served)
        if served.name != "narrow" or num_preemptions(served.engine):
            break
    else:
        raise AssertionError("nothing was preempted")


async def test_an_abort_of_a_third_leaves_nothing_and_the_others_end(served: Served) -> None:
    tasks = [asyncio.create_task(ask(served, case)) for case in CASES]
    for index, task in enumerate(tasks[::3]):
        await asyncio.sleep(0.02 * index)
        task.cancel()
    outputs = await asyncio.gather(*tasks, return_exceptions=True)
    for case, output in zip(CASES, outputs, strict=True):
        if not isinstance(output, BaseException):
            served.check(case, output)
        else:
            assert isinstance(output, asyncio.CancelledError)
    await until_idle(served)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps = 0: must be from 1 to 1000"),
        ({"guidance_scale": float("nan")}, "guidance_scale = nan: must be a number of 0 or more"),
        ({"negative_prompt": "blurry"}, "negative_prompt = 'blurry' has no effect"),
        ({"image_guidance_scale": 2.0}, "image_guidance_scale = 2.0 has no effect"),
        ({"width": 64}, "width and height are given together"),
        ({"width": 60, "height": 64}, r"size = 60x64: the nearest size of this model is 64x64"),
        ({"width": 0, "height": 64}, "size = 0x64: must be above 0"),
        ({"widht": 64}, "image.widht: did you mean 'width'"),
    ],
)
async def test_a_picture_that_cannot_be_generated_is_rejected(served: Served, given: dict[str, Any], said: str) -> None:
    if served.name == "narrow":
        pytest.skip("its pictures have other sizes")
    with pytest.raises(InvalidRequest, match=said):
        params = {"language_model": {"extra_args": {"image": given}}}
        await collect(served.omni.generate("<|startoftext|>a boat", params, modalities=["image"]))
    await until_idle(served)


async def test_diffusion_params_ask_for_pictures_of_a_text(served: Served) -> None:
    (case,) = [one for one in CASES if one.name == "chosen size"]
    params = DiffusionParams(num_inference_steps=3, output_type="latents", seed=4)
    output = await collect(served.omni.generate({"prompt": case.parts[0]}, params))
    (made,), expected = output.multimodal_output["latents"], served.expected[case.name].latents
    assert expected is not None and (made - expected).abs().max() < LATENTS * expected.abs().max()
    await until_idle(served)
