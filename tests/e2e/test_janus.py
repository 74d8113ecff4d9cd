"""Janus-Pro served through the graph, held against transformers on the same weights.

Tolerances, in float32: greedy ids equal; pictures one level of 255, as both round the same number down.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, JanusForConditionalGeneration

from tests.e2e.engines import MARKS
from tests.engine_threads import BATCHES, engine_threads, num_preemptions, thread_of
from tests.reference.media import make_image
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.models.janus.prompt import SYSTEM_PROMPT, picture_prompt
from vllm_omni.testing.janus import build

pytestmark = MARKS

MAX_TOKENS = 20

DEPLOYMENTS: dict[str, tuple[str, list[str]]] = {
    "base": ("base", ["language_model.max_num_batched_tokens=96"]),
    # Room for a few sequences, which it must preempt.
    "narrow": (
        "deep",
        [
            "language_model.block_size=32",
            "language_model.max_model_len=320",
            "language_model.num_gpu_blocks_override=13",
            "language_model.max_num_batched_tokens=64",
            "language_model.enable_prefix_caching=false",
        ],
    ),
    # A latency target that leaves few tokens beside a text.
    "hasty": (
        "base",
        [
            "language_model.max_num_batched_tokens=64",
            "language_model.epd.tpot_ms=0.5",
            "language_model.epd.patience=3",
            "language_model.epd.min_prefill_tokens=4",
        ],
    ),
    "two": ("base", ["language_model.max_num_seqs=2", "language_model.max_num_batched_tokens=24"]),
}


@dataclass
class Case:
    """A request for a text, or for a picture with a guidance scale."""

    text: str
    images: tuple[Image.Image, ...] = ()
    scale: float | None = None  # None: an answer in text

    @property
    def modality(self) -> str:
        return "text" if self.scale is None else "image"

    @property
    def prompt(self) -> dict[str, Any]:
        if self.scale is not None:
            return {"prompt": picture_prompt(self.text)}
        prompt: dict[str, Any] = {"prompt": f"{SYSTEM_PROMPT}<|User|>: {self.text}\n\n<|Assistant|>:"}
        return prompt | ({"multi_modal_data": {"image": list(self.images)}} if self.images else {})

    def params(self, **more: Any) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **more}
        if self.scale is not None:
            params["extra_args"] = {"image": {"guidance_scale": self.scale}}
        return {"language_model": params}


CASES = [
    Case("a small red boat", scale=5.0),
    Case("two cats, one of them on a table", scale=1.5),
    Case("red and green"),
    Case("<image_placeholder>\nwhat colour is the house?", (make_image(61, 50),)),
    Case("a house without guidance", scale=1.0),
    Case("<image_placeholder>\nand\n<image_placeholder>", (make_image(48, 64, seed=1), make_image(90, 40, seed=2))),
    Case("a very long picture of the sea, with ships on it, far away from the shore", scale=3.0),
    Case("a picture", scale=5.0),
]


class Reference:
    def __init__(self, path: Any) -> None:
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = JanusForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(self, case: Case) -> list[int]:
        """The ids of a text, or the codes of a picture."""
        text = f"<|User|>: {case.text}\n\n<|Assistant|>:"
        if case.scale is None:
            given = self.processor(text=[text], images=list(case.images) or None, return_tensors="pt")
            made = self.model.generate(**given, do_sample=False, max_new_tokens=MAX_TOKENS)
            return made[0, given["input_ids"].shape[1] :].tolist()
        given = self.processor(text=[text], generation_mode="image", return_tensors="pt")
        if case.scale == 1.0:
            return self._unguided(given["input_ids"])
        made = self.model.generate(**given, generation_mode="image", do_sample=False, guidance_scale=case.scale)
        return made[0].tolist()

    def _unguided(self, ids: torch.Tensor) -> list[int]:
        """Without guidance, which upstream's ``generate`` cannot be."""
        model = self.model.model
        embeds, codes = model.language_model.embed_tokens(ids), []
        for _ in range(model.config.vision_config.num_image_tokens):
            hidden = model.language_model(inputs_embeds=embeds).last_hidden_state[:, -1]
            codes.append(model.generation_head(hidden).argmax(-1))
            own = self.model.prepare_embeddings_for_image_generation(codes[-1][:, None])
            embeds = torch.cat([embeds, own], dim=1)
        return torch.cat(codes).tolist()

    @torch.no_grad()
    def image(self, codes: list[int]) -> torch.Tensor:
        """[H, W, 3] uint8."""
        pixels = self.model.decode_image_tokens(torch.tensor([codes])).permute(0, 3, 1, 2)
        made: torch.Tensor = self.processor.postprocess(list(pixels), return_tensors="pt")["pixel_values"]
        return made[0].permute(1, 2, 0)


class Served(NamedTuple):
    name: str
    omni: AsyncOmni
    reference: Reference
    expected: list[list[int]]  # by case

    @property
    def engine(self) -> StageEngine:
        return self.omni.orchestrator.front("language_model")

    @property
    def scheduler(self) -> Any:
        core = thread_of(self.engine).core
        assert core is not None
        return core.scheduler

    def check(self, case: Case, output: OmniRequestOutput) -> None:
        expected = self.expected[CASES.index(case)]
        if case.scale is None:
            assert list(output.outputs[0].token_ids) == expected, case.text
            return
        assert output.multimodal_output["picture_tokens"] == expected, case.text
        assert output.outputs[0].finish_reason == "stop" and not output.outputs[0].text
        (image,) = output.multimodal_output["images"]
        difference = (image.int() - self.reference.image(expected).int()).abs().max()
        assert difference <= 1, f"{case.text}: {difference}"


@pytest.fixture(
    scope="module",
    params=["base", *(pytest.param(name, marks=pytest.mark.long) for name in ("narrow", "hasty", "two"))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variant, overrides = DEPLOYMENTS[request.param]
    path = build(tmp_path_factory.mktemp(request.param), variant=variant)
    reference = Reference(path)
    expected = [reference.answer(case) for case in CASES]
    with engine_threads():
        engine = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "enforce_eager": True}
        given = [f"language_model.{name}={value}" for name, value in engine.items()]
        omni = AsyncOmni(path, stage_overrides=[*given, *overrides])
        yield Served(request.param, omni, reference, expected)
        omni.shutdown()


async def ask(served: Served, case: Case, **params: Any) -> OmniRequestOutput:
    modalities = ["text"] if case.scale is None else ["image", "picture_tokens"]
    generated = served.omni.generate(case.prompt, case.params(**params), modalities=modalities)
    return await asyncio.wait_for(collect(generated), 60)


async def until_idle(served: Served) -> None:
    for _ in range(2000):
        if not served.scheduler.requests:
            break
        await asyncio.sleep(0.01)
    assert not served.scheduler.requests and not served.scheduler.token_pictures
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


async def test_a_seed_gives_the_same_picture_alone_and_in_a_batch(served: Served) -> None:
    case, sampled = CASES[0], {"temperature": 1.0}
    alone = [await ask(served, case, seed=seed, **sampled) for seed in (1, 2)]
    others = (ask(served, one, **sampled) for one in CASES)
    batch = await asyncio.gather(*(ask(served, case, seed=seed, **sampled) for seed in (1, 2)), *others)
    tokens = [output.multimodal_output["picture_tokens"] for output in (*alone, *batch[:2])]
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]
    await until_idle(served)


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
    ("params", "said"),
    [
        ({"extra_args": {"image": {"guidance_scale": float("nan")}}}, "guidance_scale = nan: must be a number of 0"),
        ({"extra_args": {"image": {"guidance_scael": 2.0}}}, "image.guidance_scael: did you mean 'guidance_scale'"),
        ({"extra_args": {"image": {"width": 48}}}, "width = 48: the pictures of this model have"),
        ({"extra_args": {"image": {"num_inference_steps": 20}}}, "num_inference_steps = 20 has no effect"),
        ({"extra_args": {"image": {"negative_prompt": "cat"}}}, "negative_prompt = 'cat' has no effect"),
        ({"n": 2}, "n = 2: the answer is a picture"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: the answer is a picture"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs: the answer is a picture"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids: the answer is a picture"),
    ],
)
async def test_a_picture_that_cannot_be_written_is_rejected(served: Served, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await collect(served.omni.generate(CASES[0].prompt, {"language_model": params}, modalities=["image"]))
    await until_idle(served)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "a boat"}, "its prompt must end with <begin_of_image>"),
        (
            {"prompt": picture_prompt("<image_placeholder>"), "multi_modal_data": {"image": [make_image(40, 40)]}},
            "give no images",
        ),
        ({"prompt": picture_prompt("a" * 1000)}, "exceeds this limit"),
    ],
)
async def test_a_prompt_without_a_picture_is_rejected(served: Served, prompt: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await collect(served.omni.generate(prompt, CASES[0].params(), modalities=["image"]))
    await until_idle(served)


async def test_a_picture_without_room_is_rejected(served: Served) -> None:
    config = served.engine.vllm_config
    num_others = 9  # tokens of a prompt beside its text
    longest = config.model_config.max_model_len - len(served.expected[0])
    for num_tokens, said in ((longest + 1, f"it may have {longest}"), (longest, "two sequences of")):
        if num_tokens == longest and served.name != "narrow":
            continue  # its cache has room for two
        prompt = {"prompt": picture_prompt("a" * (num_tokens - num_others))}
        with pytest.raises(InvalidRequest, match=said):
            await collect(served.omni.generate(prompt, CASES[0].params(), modalities=["image"]))
    await until_idle(served)
