"""A tiny LLaVA-1.5 with budgets answers as vLLM does, and its towers give the same embeddings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput

from tests.reference import llava
from vllm_omni.core.sched.budget import EPD_CONFIG
from vllm_omni.core.sched.cost import CostModel
from vllm_omni.core.sched.profile import PREFIX
from vllm_omni.model_executor.epd_step import EPDSchedulerOutput

pytestmark = [
    pytest.mark.slow,
    # vLLM's own, of a worker in this process.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
]

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "async_scheduling": False,
    "limit_mm_per_prompt": {"image": 2},
}
EPD_ENGINE = {
    "worker_cls": "vllm_omni.worker.worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.epd.EPDScheduler",
}
NUM_TOKENS = 8
CHOICES = ["w7", "w9"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"))


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core in this process: its steps are looked at."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def make_prompts() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 255, (llava.IMAGE_SIZE, llava.IMAGE_SIZE, 3), dtype=np.uint8)) for _ in range(6)
    ]
    prompts: list[dict[str, Any]] = [{"prompt": f"<s> w{n} w{n + 1} w{n + 2}"} for n in range(4)]
    prompts += [
        {"prompt": f"<s> w{n} <image> w{n + 3}", "multi_modal_data": {"image": image}}
        for n, image in enumerate(images[:5])
    ]
    prompts.append({"prompt": "<s> <image> w1 <image> w2", "multi_modal_data": {"image": images[4:6]}})
    return prompts


class Run:
    """What an engine answers, and every step that it took."""

    def __init__(self, checkpoint: Path, **engine: Any) -> None:
        self.steps: list[SchedulerOutput] = []
        llm = LLM(str(checkpoint), **{**ENGINE, **engine})
        core = llm.llm_engine.engine_core.engine_core
        schedule = core.scheduler.schedule
        runner = core.model_executor.driver_worker.worker.model_runner
        self.embeds: dict[str, torch.Tensor] = {}

        def watched(*args: Any) -> SchedulerOutput:
            self.embeds |= runner.encoder_cache
            self.steps.append(schedule(*args))
            return self.steps[-1]

        core.scheduler.schedule = watched
        prompts = make_prompts()
        params = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True) for _ in prompts]
        for constrained in (1, 5):  # a text and an image
            params[constrained] = SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, structured_outputs=StructuredOutputsParams(choice=CHOICES)
            )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        self.embeds = {name: one for name, one in self.embeds.items() if not name.startswith(PREFIX)}
        self.texts = [output.outputs[0].text for output in outputs]
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.num_layers_of_batch = runner.encoder.num_layers_of_batch if getattr(runner, "encoder", None) else None
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield Run(checkpoint)


COST = CostModel(
    step_s=1e-3,
    decode_s=1e-4,
    decode_context_s=0.0,
    prefill_token_s=1e-4,
    prefill_pair_s=0.0,
    encode_s=0.0,
    embed_s=1e-3,
)


@pytest.mark.parametrize(
    "epd",
    [
        {"token_budget": 24, "image_budget": llava.NUM_IMAGE_TOKENS, "num_encode_layers": 1},
        {"token_budget": 256, "image_budget": 4 * llava.NUM_IMAGE_TOKENS, "num_encode_layers": 2},
        {"tpot_ms": 5.0, "cost": vars(COST)},
        {"tpot_ms": 5.0},
        {"tpot_ms": 5.0, "profile_s": 0},
    ],
    ids=["one image, a layer a step", "batches, two layers a step", "from costs", "costs measured", "costs learned"],
)
def test_with_budgets_it_answers_as_stock_does(checkpoint: Path, stock: Run, epd: dict[str, Any]) -> None:
    run = Run(checkpoint, **EPD_ENGINE, additional_config={EPD_CONFIG: epd})
    assert run.tokens == stock.tokens
    assert len({tuple(tokens) for tokens in stock.tokens[4:9]}) > 1  # or the images would not matter
    assert {run.texts[1].strip(), run.texts[5].strip()} <= set(CHOICES)
    assert not any(step.scheduled_encoder_inputs for step in run.steps)
    # Each image once, and its embeddings but for how a batch is summed.
    begun = [item.feature.identifier for step in run.steps for item in getattr(step, "encodes", ())]
    begun = [name for name in begun if not name.startswith(PREFIX)]  # of the profile at the start
    assert sorted(begun) == sorted(stock.embeds)
    assert run.embeds.keys() == stock.embeds.keys()
    for name, embeds in run.embeds.items():
        torch.testing.assert_close(embeds, stock.embeds[name], rtol=1e-4, atol=1e-4)
    if "num_encode_layers" in epd:
        assert run.num_layers_of_batch == llava.NUM_TOWER_LAYERS - 1
        sliced = [step for step in run.steps if getattr(step, "num_encode_layers", None)]
        assert sliced and all(step.num_scheduled_tokens for step in sliced)


def test_without_budgets_images_are_encoded_where_stock_does(checkpoint: Path, stock: Run) -> None:
    run = Run(checkpoint, **EPD_ENGINE)
    assert run.tokens == stock.tokens
    assert run.num_layers_of_batch is None
    assert sum(len(step.scheduled_encoder_inputs) for step in run.steps) == 6
    assert not any(isinstance(step, EPDSchedulerOutput) for step in run.steps)
