"""A tiny LLaVA-1.5 with budgets answers as vLLM does, and its towers give the same embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput

from tests.e2e.engines import MARKS, OMNI, engine_here, greedy, make_image, tokens_of
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.profile import PREFIX
from vllm_omni.epd.cost import CostModel
from vllm_omni.messages.epd_step import EPDSchedulerOutput
from vllm_omni.testing import llava as llava

pytestmark = MARKS

CHOICES = ["w7", "w9"]


def make_prompts() -> list[dict[str, Any]]:
    images = [make_image(seed) for seed in range(6)]
    prompts: list[dict[str, Any]] = [{"prompt": f"<s> w{n} w{n + 1} w{n + 2}"} for n in range(4)]
    prompts += [
        {"prompt": f"<s> w{n} <image> w{n + 3}", "multi_modal_data": {"image": image}}
        for n, image in enumerate(images[:5])
    ]
    prompts.append({"prompt": "<s> <image> w1 <image> w2", "multi_modal_data": {"image": images[4:6]}})
    return prompts


class Run:
    """The replies of an engine, and its steps."""

    def __init__(self, checkpoint: Path, **engine: Any) -> None:
        self.steps: list[SchedulerOutput] = []
        self.embeds: dict[str, torch.Tensor] = {}
        prompts = make_prompts()
        params = [greedy() for _ in prompts]
        for constrained in (1, 5):  # a text and an image
            params[constrained] = greedy(ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=CHOICES))
        with engine_here(checkpoint, async_scheduling=False, **engine) as llm:
            core = llm.llm_engine.engine_core.engine_core
            schedule = core.scheduler.schedule
            runner = core.model_executor.driver_worker.worker.model_runner

            def watched(*args: Any) -> SchedulerOutput:
                self.embeds |= runner.encoder_cache
                self.steps.append(schedule(*args))
                return self.steps[-1]

            core.scheduler.schedule = watched
            outputs = llm.generate(prompts, params, use_tqdm=False)
            encoder = getattr(runner, "encoder", None)
            self.num_layers_of_batch = encoder.num_layers_of_batch if encoder else None
        self.embeds = {name: one for name, one in self.embeds.items() if not name.startswith(PREFIX)}
        self.texts = [output.outputs[0].text for output in outputs]
        self.tokens = tokens_of(outputs)


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path) -> Run:
    return Run(llava_checkpoint)


EPD_ENGINE = {name: OMNI[name] for name in ("worker_cls", "scheduler_cls")}
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
        pytest.param(
            {"token_budget": 24, "image_budget": llava.NUM_IMAGE_TOKENS, "num_encode_layers": 1},
            id="one image, a layer a step",
        ),
        pytest.param(
            {"token_budget": 256, "image_budget": 4 * llava.NUM_IMAGE_TOKENS, "num_encode_layers": 2},
            id="batches, two layers a step",
            marks=pytest.mark.long,
        ),
        pytest.param({"tpot_ms": 5.0, "cost": vars(COST)}, id="costs given", marks=pytest.mark.long),
        pytest.param({"tpot_ms": 5.0}, id="costs measured", marks=pytest.mark.long),
        pytest.param({"tpot_ms": 5.0, "profile_s": 0}, id="costs learned", marks=pytest.mark.long),
        pytest.param(
            {"token_budget": 24, "image_budget": llava.NUM_IMAGE_TOKENS, "encode_in": "thread"},
            id="one image, in a thread",
            marks=pytest.mark.long,
        ),
        pytest.param({"tpot_ms": 5.0, "encode_in": "thread"}, id="costs measured, in a thread"),
    ],
)
def test_with_budgets_it_answers_as_upstream_does(llava_checkpoint: Path, upstream: Run, epd: dict[str, Any]) -> None:
    run = Run(llava_checkpoint, **EPD_ENGINE, additional_config={EPD_CONFIG: epd})
    assert run.tokens == upstream.tokens
    assert len({tuple(tokens) for tokens in upstream.tokens[4:9]}) > 1  # or the images would not matter
    assert {run.texts[1].strip(), run.texts[5].strip()} <= set(CHOICES)
    assert not any(step.scheduled_encoder_inputs for step in run.steps)
    # Each image is encoded once; its embeddings differ by the order of sums in a batch.
    encoded = [item.feature.identifier for step in run.steps for item in getattr(step, "encodes", ())]
    encoded = [name for name in encoded if not name.startswith(PREFIX)]  # of the profile at the start
    assert sorted(encoded) == sorted(upstream.embeds)
    assert run.embeds.keys() == upstream.embeds.keys()
    for name, embeds in run.embeds.items():
        torch.testing.assert_close(embeds, upstream.embeds[name], rtol=1e-4, atol=1e-4)
    if "num_encode_layers" in epd:
        assert run.num_layers_of_batch == llava.NUM_TOWER_LAYERS - 1
        sliced = [step for step in run.steps if getattr(step, "num_encode_layers", None)]
        assert sliced and all(step.num_scheduled_tokens for step in sliced)


def test_without_budgets_images_are_encoded_where_upstream_does(llava_checkpoint: Path, upstream: Run) -> None:
    run = Run(llava_checkpoint, **EPD_ENGINE)
    assert run.tokens == upstream.tokens
    assert run.num_layers_of_batch is None
    assert sum(len(step.scheduled_encoder_inputs) for step in run.steps) == 6
    assert not any(isinstance(step, EPDSchedulerOutput) for step in run.steps)


@pytest.mark.parametrize("encode_in", ["slices", pytest.param("thread", marks=pytest.mark.long)])
def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    llava_checkpoint: Path, upstream: Run, encode_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epd = {"token_budget": 24, "image_budget": 2 * llava.NUM_IMAGE_TOKENS, "encode_in": encode_in}
    epd["num_encode_layers"] = 1
    with engine_here(llava_checkpoint, **OMNI, additional_config={EPD_CONFIG: epd}) as llm:
        core = llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker.worker.model_runner.model
        embed_multimodal = model.embed_multimodal

        def reject_black(**inputs: Any) -> Any:
            for pixels in inputs["pixel_values"]:
                if bool((pixels == pixels[..., :1, :1]).all()):
                    raise ValueError("nothing to be seen")
            return embed_multimodal(**inputs)

        monkeypatch.setattr(model, "embed_multimodal", reject_black)
        text, image = make_prompts()[0], make_prompts()[4]
        black = Image.new("RGB", (llava.IMAGE_SIZE, llava.IMAGE_SIZE))
        unseen = {"prompt": "<s> <image>", "multi_modal_data": {"image": black}}
        # In one batch with the other image.
        outputs = [one.outputs[0] for one in llm.generate([text, unseen, image], greedy(), use_tqdm=False)]
        assert [one.finish_reason for one in outputs] == ["length", "error", "length"]
        assert [list(outputs[n].token_ids) for n in (0, 2)] == [upstream.tokens[0], upstream.tokens[4]]

        # A request is aborted while its image is encoded; another has the same image.
        llm.llm_engine.add_request("decodes", text, greedy(max_tokens=50))
        llm.llm_engine.step()
        llm.llm_engine.add_request("aborted", make_prompts()[6], greedy())
        llm.llm_engine.step()
        assert core.scheduler.planner.is_encoding
        llm.llm_engine.abort_request(["aborted", "decodes"])
        assert tokens_of(llm.generate([make_prompts()[6]], greedy(), use_tqdm=False)) == [upstream.tokens[6]]
