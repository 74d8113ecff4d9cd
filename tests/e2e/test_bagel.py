"""BAGEL served through the graph, held against a plain reference that is equal to the original code
(``tests/reference/bagel.py``), on the same weights and noise.

Tolerances, in float32: ids equal; latents 1e-5 of their maximum. The auto-encoder's posterior is its mean.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cases import rejected
from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.reference.bagel import Context, Guidance, Reference, grid_of, latent_of, tokens_of
from tests.reference.media import make_image
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.testing.bagel import build

pytestmark = MARKS

BLOCK = 32
LATENTS = 1e-5  # of the maximum
MAX_TOKENS = 16

DEPLOYMENTS: dict[str, tuple[str, list[str]]] = {
    "base": (
        "base",
        [
            "language_model.max_num_batched_tokens=64",
            f"language_model.block_size={BLOCK}",
            "language_model.num_gpu_blocks_override=33",
        ],
    ),
    # Room for a few sequences, which it must preempt; a step holds two canvases.
    "narrow": (
        "deep",
        [
            f"language_model.block_size={BLOCK}",
            "language_model.max_model_len=256",
            "language_model.num_gpu_blocks_override=11",
            "language_model.max_num_batched_tokens=64",
            "language_model.enable_prefix_caching=false",
        ],
    ),
    # A latency target that leaves no tokens beside a text.
    "hasty": (
        "base",
        [
            "language_model.max_num_batched_tokens=64",
            "language_model.epd.tpot_ms=0.5",
            "language_model.epd.patience=3",
            "language_model.epd.min_prefill_tokens=4",
        ],
    ),
    "one": ("base", ["language_model.max_num_seqs=1", "language_model.max_num_batched_tokens=64"]),
}

Part = str | list[int] | Image.Image

# Of ImageParams, in the order of the reference's.
GUIDANCE = ["guidance_scale", "image_guidance_scale", "guidance_interval", "guidance_renorm_min", "guidance_renorm"]


@dataclass
class Case:
    """A request: texts and images, and what is asked for."""

    name: str
    parts: Sequence[Part]
    picture: dict[str, Any] | None = None  # None: an answer in text
    thinks: bool = False
    guidance: Guidance = field(default_factory=lambda: Guidance(1.0, 1.0))

    @property
    def prompt(self) -> dict[str, Any]:
        text = "".join(
            f"<|im_start|>{part}<|im_end|>" if isinstance(part, str) else "<|vision_start|><|vision_end|>"
            for part in self.parts
        )
        prompt: dict[str, Any] = {"prompt": text + "<|im_start|>" * (self.thinks or self.picture is None)}
        if images := [part for part in self.parts if isinstance(part, Image.Image)]:
            prompt |= {"multi_modal_data": {"image": images}, "mm_processor_kwargs": self.media_kwargs}
        return prompt

    @property
    def media_kwargs(self) -> dict[str, Any]:
        return {} if self.picture is None else {"is_drawn": True}

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        if self.picture is not None:
            guidance = dict(zip(GUIDANCE, self.guidance, strict=True))
            params["extra_args"] = {"image": {"output_type": "latents", **guidance, **self.picture}}
        return {"language_model": params}


CASES = [
    Case("plain", ["a small red boat on a lake"], {"width": 64, "height": 48, "num_inference_steps": 4, "seed": 1}),
    Case(
        "guided",
        ["two boats, one red"],
        {"width": 48, "height": 64, "num_inference_steps": 5, "seed": 2},
        guidance=Guidance(3.0, 1.5),
    ),
    Case(
        "negative",
        ["a small red boat"],
        {"width": 48, "height": 32, "num_inference_steps": 3, "seed": 8, "negative_prompt": "blurry"},
        guidance=Guidance(3.0, 1.0, (0.0, 1.0)),
    ),
    Case("answer", ["red and green"]),
    Case("seen", [make_image(61, 50), "what colour is the house?"]),
    Case("seen in another image", [make_image(61, 50, seed=9), "what colour is the house?"]),
    Case(
        "edit",
        [make_image(61, 50), "paint the boat blue"],
        {"num_inference_steps": 4, "seed": 3},
        guidance=Guidance(4.0, 2.0, (0.0, 1.0), 0.0, "text_channel"),
    ),
    Case(
        "thought",
        ["think first", "paint the house"],
        {"width": 48, "height": 48, "num_inference_steps": 3, "seed": 4},
        thinks=True,
        guidance=Guidance(4.0, 1.5),
    ),
    Case(
        "interleaved",
        ["first", make_image(48, 64, seed=1), "second", make_image(61, 50, seed=2), "the first in the second's colour"],
        {"num_inference_steps": 3, "seed": 5, "shift": 2.0},
        guidance=Guidance(4.0, 2.0, (0.0, 0.9), 0.2, "channel"),
    ),
    Case(
        "long answer", [make_image(90, 40, seed=3), "one", make_image(40, 70, seed=4), "what is in the second image?"]
    ),
    Case(
        "thought edit",
        ["think first", make_image(48, 64, seed=5), "add a cat"],
        {"num_inference_steps": 4, "seed": 6},
        thinks=True,
        guidance=Guidance(4.0, 2.0, (0.2, 0.9), 0.3),
    ),
    Case(
        "late guidance",
        [make_image(61, 50), "paint it"],
        {"width": 32, "height": 32, "num_inference_steps": 6, "seed": 7},
        guidance=Guidance(2.0, 2.0, (0.0, 0.8), 0.0, "channel"),
    ),
]


class Expected(NamedTuple):
    ids: list[int]  # of the text
    latents: torch.Tensor | None


def expected_of(reference: Reference, case: Case) -> Expected:
    gen = text = img = reference.new_context()
    for part in case.parts:
        if not isinstance(part, Image.Image):
            text, gen, img = gen, reference.read_text(gen, part), reference.read_text(img, part)
            continue
        image = reference.resize(part, "vae_transform")
        if case.picture is not None:
            gen = reference.read_latents(gen, reference.encode_pixels(image, None))
        text = gen = reference.read_view(gen, image)
    ids: list[int] = []
    if case.thinks or case.picture is None:
        ids, _ = reference.answer(gen, MAX_TOKENS)
    if case.picture is None:
        return Expected(ids, None)
    if case.thinks:  # a text that is cut off ends in the place of its last token
        gen, ids = reference.read_text(gen, ids[:-1]), [*ids[:-1], reference.eos]
    if (negative := case.picture.get("negative_prompt")) is not None:
        text = reference.read_text(text, negative)
    return Expected(ids, latents_of(reference, case, (gen, text, img)))


def latents_of(reference: Reference, case: Case, branches: tuple[Context, Context, Context]) -> torch.Tensor:
    given = case.picture
    assert given is not None
    if "width" in given:
        rows, columns = given["height"] // 16, given["width"] // 16
    else:
        images = [part for part in case.parts if isinstance(part, Image.Image)]
        width, height = reference.resize(images[-1], "vae_transform").size
        rows, columns = height // 16, width // 16
    noise = torch.randn(rows * columns, 64, generator=torch.Generator().manual_seed(given["seed"]))
    canvas = reference.denoise(
        noise,
        (rows, columns),
        branches,
        num_timesteps=given["num_inference_steps"] + 1,
        shift=given.get("shift", 3.0),
        guidance=case.guidance,
    )
    return latent_of(canvas.latents[-1], rows, columns)


class Served(NamedTuple):
    name: str
    omni: AsyncOmni
    expected: dict[str, Expected]
    reference: Reference

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
    scope="module",
    params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("narrow", "hasty", "one"))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variant, overrides = DEPLOYMENTS[request.param]
    path = build(tmp_path_factory.mktemp(request.param), variant=variant)
    reference = Reference(path)
    with torch.no_grad():
        expected = {case.name: expected_of(reference, case) for case in CASES}
    with engine_threads():
        engine = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
        given = [f"language_model.{name}={value}" for name, value in engine.items()]
        omni = AsyncOmni(path, stage_overrides=[*given, *overrides])
        yield Served(request.param, omni, expected, reference)
        omni.shutdown()


async def ask(served: Served, case: Case, **more: Any) -> OmniRequestOutput:
    modalities = ["text"] if case.picture is None else ["image"]
    generated = served.omni.generate(case.prompt, case.params, modalities=modalities, **more)
    return await asyncio.wait_for(collect(generated), 60)


async def until_idle(served: Served) -> None:
    for _ in range(2000):
        if not served.scheduler.requests:
            break
        await asyncio.sleep(0.01)
    assert not served.scheduler.requests and not served.scheduler.canvases
    assert served.scheduler.kv_cache_manager.usage == 0.0


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
    pictures, texts = ([case for case in CASES if (case.picture is None) == is_text] for is_text in (False, True))
    cases = [*pictures, *(texts[index % len(texts)] for index in range(2 * len(pictures)))]
    random.Random(0).shuffle(cases)
    tasks = [asyncio.create_task(ask(served, case)) for case in cases]
    for index, task in enumerate(tasks[::3]):
        await asyncio.sleep(0.02 * index)
        task.cancel()
    outputs = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(output, asyncio.CancelledError) for output in outputs) > 1
    for case, output in zip(cases, outputs, strict=True):
        if not isinstance(output, BaseException):
            served.check(case, output)
        else:
            assert isinstance(output, asyncio.CancelledError)
    await until_idle(served)


async def test_images_with_equal_placeholders_share_no_pages(served: Served) -> None:
    one, other = (case for case in CASES if case.name.startswith("seen"))
    outputs = [await ask(served, case) for case in (one, other)]
    first, second = (list(output.prompt_token_ids) for output in outputs)
    assert first == second
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    assert ids[0] != ids[1], "what is seen makes no difference"


async def test_the_pages_of_a_canvas_are_not_cached(served: Served) -> None:
    (case,) = (case for case in CASES if case.name == "plain")
    await until_idle(served)
    pool = served.scheduler.kv_cache_manager.block_pool
    assert served.scheduler.reset_prefix_cache()
    num_tokens = len((await ask(served, case)).prompt_token_ids)
    assert num_tokens < BLOCK < num_tokens + 14, "the canvas fills the block"
    await until_idle(served)
    assert len(pool.cached_block_hash_to_block) == 0


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"num_inference_steps": 0}, "num_inference_steps = 0: must be from 1 to 1000"),
    ({"guidance_scale": float("nan")}, "guidance_scale = nan: must be a number of 0 or more"),
    ({"guidance_interval": [-0.1, 1.0]}, r"guidance_interval = \[-0.1, 1.0\]: must be"),
    ({"guidance_renorm": "globel"}, "did you mean 'global'"),
    ({"width": 1, "height": 1}, "height = 1: must be a multiple of 16 up to [0-9]+; the nearest is 16"),
    ({"width": 128, "height": 128}, "its 66 tokens are computed in one step, which has at most 64|up to 96"),
    ({"widht": 64}, "image.widht: did you mean 'width'"),
    ({"num_inference_steps": "many"}, "image: Expected `int`"),
    ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt = 0: must be from 1 to 64"),
    ({"seed": 2**64 - 1, "num_outputs_per_prompt": 2}, "seed = 18446744073709551615: must be from"),
]


async def test_a_picture_that_cannot_be_generated_is_rejected(served: Served) -> None:
    for given, said in REJECTED:
        params = {"language_model": {"extra_args": {"image": given}}}
        with rejected(InvalidRequest, said, given):
            await collect(served.omni.generate("<|im_start|>a boat<|im_end|>", params, modalities=["image"]))
    for name, value in {"logprobs": 1, "prompt_logprobs": 1, "n": 2}.items():
        with rejected(InvalidRequest, f"{name}.*: the answer is a picture", name):
            params = {"language_model": {name: value, "temperature": 1.0}}
            await collect(served.omni.generate("<|im_start|>a boat<|im_end|>", params, modalities=["image"]))
    await until_idle(served)


async def test_each_placeholder_of_a_prompt_needs_an_image(served: Served) -> None:
    image = make_image(61, 50)
    for text, said in [
        ("<|vision_start|><|vision_end|>" * 2, "has 2 placeholders of images .*and 1 in multi_modal_data"),
        ("", "cannot be read"),
    ]:
        prompt = {"prompt": f"{text}<|im_start|>a<|im_end|><|im_start|>", "multi_modal_data": {"image": [image]}}
        with rejected(InvalidRequest, said, text):
            await collect(served.omni.generate(prompt, modalities=["text"]))
    await until_idle(served)


async def test_texts_and_pictures_alternate_in_an_answer(served: Served) -> None:
    (case,) = (case for case in CASES if case.name == "thought edit")
    assert case.picture is not None
    given = case.params["language_model"]
    image = {**given["extra_args"]["image"], "output_type": "media", "num_outputs_per_prompt": 3}
    params = {"language_model": {**given, "extra_args": {"image": image}}}
    generated = served.omni.generate(case.prompt, params, modalities=["text", "image"])
    output = await asyncio.wait_for(collect(generated), 120)
    pictures, ids = output.images, list(output.outputs[0].token_ids)
    assert len(pictures) == len(output.multimodal_output["text_offsets"]) == 3 and output.finished
    parts = list(case.parts)
    for index, picture in enumerate(pictures):
        expected = expected_of(served.reference, replace(case, parts=parts, picture=case.picture | {"seed": 6 + index}))
        assert ids[: len(expected.ids)] == expected.ids
        assert expected.latents is not None
        with torch.no_grad():
            decoded = served.reference.decode_latents(tokens_of(expected.latents), *grid_of(expected.latents))
        assert abs(np.asarray(picture).astype(int) - decoded).max() <= 1
        ids = ids[len(expected.ids) + 1 :]  # the picture ends with a token
        parts += [expected.ids[:-1], picture]


async def test_progress_and_previews_come_while_a_picture_is_made(served: Served) -> None:
    for name in ("guided", "thought"):
        (case,) = (case for case in CASES if case.name == name)
        assert case.picture is not None
        reporting = replace(case, picture=case.picture | {"progress": True, "preview_every": 2})
        steps, previews, num_steps = [], [], case.picture["num_inference_steps"]

        async def watched(reporting: Case = reporting, steps: Any = steps, previews: Any = previews) -> Any:
            async for output in served.omni.generate(reporting.prompt, reporting.params, modalities=["image"]):
                if output.progress is not None:
                    steps.append(output.progress.step)
                if output.preview is not None:
                    previews.append((output.progress.step, output.preview.size))
                yield output

        served.check(case, await collect(watched()))
        assert steps == list(range(1, num_steps))
        size = (case.picture["width"], case.picture["height"])
        assert previews == [(step, size) for step in range(2, num_steps, 2)]
    await until_idle(served)


async def test_diffusion_params_ask_for_pictures_of_a_text(served: Served) -> None:
    (case,) = [one for one in CASES if one.name == "negative"]
    assert case.picture is not None
    given = {"num_inference_steps": 3, "guidance_scale": 3.0, "width": 48, "height": 32, "output_type": "latents"}
    own = {"image_guidance_scale": 1.0, "guidance_interval": [0.0, 1.0]}
    params = DiffusionParams(**given, seed=8, num_outputs_per_prompt=2, extra_args=own)
    output = await collect(served.omni.generate({"prompt": case.parts[0], "negative_prompt": "blurry"}, params))
    first, second = output.multimodal_output["latents"]
    expected = served.expected["negative"].latents
    assert expected is not None and (first - expected).abs().max() < LATENTS * expected.abs().max()
    assert (second - first).abs().max() > 0.1, "another seed"
    with pytest.raises(InvalidRequest, match="num_frames = 3 has no effect"):
        await collect(served.omni.generate("a boat", DiffusionParams(num_frames=3)))
    await until_idle(served)
