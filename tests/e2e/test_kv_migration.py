"""Prefill in one process, decode in another: a tiny LLaVA-1.5 answers as one upstream engine does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from tests.e2e.engines import (
    MARKS,
    NUM_TOKENS,
    OMNI,
    UPSTREAM,
    engine_apart,
    engine_here,
    kill,
    make_image,
    tokens_of,
    upstream_answers,
)
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.messages.payload import decode
from vllm_omni.relay.hub import RelayHub, RelayOptions

pytestmark = MARKS

PAGE_BYTES = 2 * 2 * UPSTREAM["block_size"] * 64 * 4  # layers, heads, tokens, keys and values of 32 numbers, float32


def kv_config(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "RelayKVConnector",
        "kv_connector_module_path": "vllm_omni.kv.kv_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
    }


def make_prompts() -> list[dict[str, Any]]:
    """Texts up to four blocks long, and images that a block's end cuts in two."""
    images = [make_image(seed) for seed in range(3)]

    def words(count: int, first: int) -> str:
        return " ".join(f"w{(first + 7 * number) % 100}" for number in range(count))

    prompts: list[dict[str, Any]] = [{"prompt": f"<s> {words(count, count)}"} for count in (1, 30, 31, 32, 63, 90, 127)]
    prompts += [
        {"prompt": f"<s> {words(count, count)} <image> w5", "multi_modal_data": {"image": images[0]}}
        for count in (0, 20, 30)
    ]
    prompts.append({"prompt": f"<s> {words(9, 3)} <image> w1 <image> w2", "multi_modal_data": {"image": images[1:3]}})
    return prompts


def make_params() -> list[SamplingParams]:
    """One for each prompt, of all the kinds whose state a request carries from token to token."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 17},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
    ]
    return [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kinds[number % len(kinds)])
        for number in range(len(make_prompts()))
    ]


def logprobs_of(outputs: list[RequestOutput]) -> list[list[dict[int, float]]]:
    return [
        [{token: one.logprob for token, one in position.items()} for position in output.outputs[0].logprobs or ()]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def upstream(llava_checkpoint: Path) -> list[RequestOutput]:
    return upstream_answers(llava_checkpoint, make_prompts(), make_params())


class Router:
    """What stands in front: it hands announcements on, and ends the leases of the pages."""

    def __init__(self) -> None:
        self.hub = RelayHub(RelayOptions(), prefault=False)

    def prefill(self, source: LLM, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
        outputs = source.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
        return [output.kv_transfer_params or {} for output in outputs]

    def decode(
        self,
        target: LLM,
        announced: list[dict[str, Any]],
        prompts: list[dict[str, Any]],
        params: list[SamplingParams],
    ) -> list[RequestOutput]:
        own = [one.clone() for one in params]
        for one, announcement in zip(own, announced, strict=True):
            one.extra_args = {"kv_transfer_params": announcement}
        return target.generate(prompts, own, use_tqdm=False)

    def release(self, announced: list[dict[str, Any]]) -> None:
        for announcement in announced:
            self.hub.release_payload(decode(announcement["pages"]), for_all=True)


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.hub.close()


class Target:
    """A decode instance in this process, whose steps are looked at."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[SchedulerOutput] = []
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = self.scheduler.schedule

        def watched(*args: Any) -> SchedulerOutput:
            self.steps.append(schedule(*args))
            return self.steps[-1]

        self.scheduler.schedule = watched

    def take_steps(self) -> list[SchedulerOutput]:
        steps, self.steps = self.steps, []
        return steps


def num_computed(steps: list[SchedulerOutput]) -> int:
    return sum(step.total_num_scheduled_tokens for step in steps)


def num_encodes(steps: list[SchedulerOutput]) -> int:
    return sum(len(step.scheduled_encoder_inputs) + len(getattr(step, "encodes", ())) for step in steps)


@pytest.fixture(scope="module")
def target(llava_checkpoint: Path, upstream: list[RequestOutput]) -> Iterator[Target]:
    engine = {
        "kv_transfer_config": kv_config("kv_consumer"),
        "additional_config": {
            "relay": {"transport": "shm"},
            EPD_CONFIG: {"token_budget": 64, "image_budget": 32, "num_encode_layers": 2},
        },
    }
    with engine_here(llava_checkpoint, **OMNI, **engine) as llm:
        yield Target(llm)


@pytest.fixture(scope="module")
def source(llava_checkpoint: Path) -> Iterator[LLM]:
    """A prefill instance in a process of its own, which computes a prompt in several chunks."""
    engine = {
        "max_num_batched_tokens": 48,
        "kv_transfer_config": kv_config("kv_producer"),
        "additional_config": {"relay": {"transport": "tcp", "num_bytes": 64 * PAGE_BYTES}},
    }
    with engine_apart(llava_checkpoint, **OMNI, **engine) as llm:
        yield llm


@pytest.mark.parametrize("round", ["fresh", "cached"])
def test_a_pair_answers_as_one_engine_does(
    source: LLM, target: Target, router: Router, upstream: list[RequestOutput], round: str
) -> None:
    prompts, params = make_prompts(), make_params()
    target.take_steps()
    announced = router.prefill(source, prompts)
    assert [one["num_tokens"] for one in announced] == [len(output.prompt_token_ids or ()) for output in upstream]
    answers = router.decode(target.llm, announced, prompts, params)
    router.release(announced)
    assert tokens_of(answers) == tokens_of(upstream)
    assert logprobs_of(answers) == [
        [pytest.approx(position, abs=1e-4) for position in positions] for positions in logprobs_of(upstream)
    ]
    steps = target.take_steps()
    assert num_encodes(steps) == 0, "the source has encoded the images"
    assert num_computed(steps) == len(prompts) * NUM_TOKENS, "and computed the prompts"
    assert len({tuple(tokens) for tokens in tokens_of(upstream)[7:]}) > 1  # or the images would not matter


def test_pages_of_a_source_that_was_killed_are_computed(
    source: LLM, target: Target, router: Router, upstream: list[RequestOutput]
) -> None:
    # The last test of this source.
    prompts, params = make_prompts(), make_params()
    assert target.llm.reset_prefix_cache()
    announced = router.prefill(source, prompts)
    num_pulled = len(prompts) // 2
    answers = router.decode(target.llm, announced[:num_pulled], prompts[:num_pulled], params[:num_pulled])
    steps = target.take_steps()
    assert num_computed(steps) == num_pulled * NUM_TOKENS
    kill(source)
    answers += router.decode(target.llm, announced[num_pulled:], prompts[num_pulled:], params[num_pulled:])
    assert tokens_of(answers) == tokens_of(upstream)
    assert num_computed(target.take_steps()) > len(prompts[num_pulled:]) * NUM_TOKENS
    assert not target.scheduler.requests
