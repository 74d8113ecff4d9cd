"""Where the time of a real engine's requests goes: a tiny LLaVA-1.5 that encodes beside its language model."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.e2e.engines import UPSTREAM, make_image
from vllm_omni import OmniLLM
from vllm_omni.engine.latency import PARTS
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import llava as llava

BUDGETS = {"token_budget": 24, "image_budget": llava.NUM_IMAGE_TOKENS, "num_encode_layers": 1, "ttft_ms": 60_000}
STAGE = "language"


@pytest.fixture(scope="module")
def llm(llava_checkpoint: Path) -> Iterator[OmniLLM]:
    with OmniLLM(llava_checkpoint, **UPSTREAM, epd=BUDGETS, log_stats=True) as llm:
        yield llm


def make_prompt(seed: int, *, has_image: bool) -> dict[str, Any]:
    media = {"multi_modal_data": {"image": make_image(seed)}} if has_image else {}
    return {"prompt": f"<s> w{seed}{' <image>' if has_image else ''} w3", **media}


def ask(llm: OmniLLM, *prompts: dict[str, Any], **params: Any) -> list[OmniRequestOutput]:
    return llm.generate(list(prompts), {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **params})


def total(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"vllm_omni:{name}", {"stage": STAGE, **labels}) or 0.0


def test_parts_of_an_image_and_a_text_sum_to_their_latency(llm: OmniLLM) -> None:
    outputs = ask(llm, *(make_prompt(seed, has_image=seed % 2 == 0) for seed in range(4)))
    for index, output in enumerate(outputs):
        parts = output.latency_parts[STAGE]
        assert tuple(parts) == PARTS
        assert all(seconds >= 0 for seconds in parts.values())
        # The front end's clock and the engine's; on busy cores, a process waits tens of milliseconds in between.
        assert sum(parts.values()) == pytest.approx(output.stage_durations["total"], rel=0.05, abs=0.1)
        if index % 2 == 0:
            assert parts["encode_queueing"] and parts["encode_execution"]
        else:
            assert not parts["encode_queueing"] and not parts["encode_execution"]
        assert parts["prefill_execution"] and parts["decode_execution"]
        assert not parts["ep_migration"] and not parts["pd_migration"]
        assert output.kv_transfer_params is None
    assert total("latency_part_seconds_count", part="encode_execution") >= 4
    assert (REGISTRY.get_sample_value("vllm_omni:read_seconds_count") or 0) >= 4


def test_a_reply_of_one_token_has_no_decode(llm: OmniLLM) -> None:
    (output,) = ask(llm, make_prompt(9, has_image=True), max_tokens=1)
    parts = output.latency_parts[STAGE]
    assert parts["encode_execution"] and parts["prefill_execution"]
    assert not parts["decode_queueing"] and not parts["decode_execution"]


def test_an_answer_that_ends_with_a_stop_string_has_its_parts(llm: OmniLLM) -> None:
    (whole,) = ask(llm, make_prompt(11, has_image=False))
    stop = whole.outputs[0].text.split()[2]
    (output,) = ask(llm, make_prompt(11, has_image=False), stop=[stop])
    assert output.outputs[0].finish_reason == "stop"
    assert output.latency_parts[STAGE]["prefill_execution"] and output.latency_parts[STAGE]["decode_execution"]


def test_several_answers_of_one_request_have_parts_of_their_whole(llm: OmniLLM) -> None:
    (output,) = ask(llm, make_prompt(12, has_image=True), n=2, temperature=1.0, seed=0)
    assert len(output.outputs) == 2
    parts = output.latency_parts[STAGE]
    assert sum(parts.values()) == pytest.approx(output.stage_durations["total"], rel=0.05, abs=0.1)
    assert parts["encode_execution"] and parts["prefill_execution"] and parts["decode_execution"]


def test_slos_of_the_deployment_and_of_requests_are_judged(llm: OmniLLM) -> None:
    requests, met = total("slo_requests_total"), total("slo_met_total")
    missed_ttft, missed_tpot = total("slo_missed_ttft_total"), total("slo_missed_tpot_total")
    (good,) = ask(llm, make_prompt(1, has_image=False))  # the deployment's TTFT
    (late,) = ask(llm, make_prompt(1, has_image=False), extra_args={"slo": {"ttft_ms": 0.001, "tpot_ms": 0.001}})
    assert good.slo_reports[STAGE].is_met_strictly and good.slo_reports[STAGE].num_gaps == 5
    report = late.slo_reports[STAGE]
    assert not report.is_ttft_met and not report.is_tpot_met and report.num_late_gaps == 5
    assert report.ttft_s is not None and report.ttft_s > 0
    assert total("slo_requests_total") == requests + 2
    assert total("slo_met_total") == met + 1
    assert total("slo_missed_ttft_total") == missed_ttft + 1
    assert total("slo_missed_tpot_total") == missed_tpot + 1


@pytest.mark.parametrize("slo", [{"tpot_ms": -1}, "fast", {"tpot": 30}, {"ttft_ms": "soon"}, [30]])
def test_an_invalid_slo_fails_alone(llm: OmniLLM, slo: Any) -> None:
    async def both() -> list[Any]:
        async def one(extra_args: dict[str, Any] | None) -> Any:
            params = {"temperature": 0.0, "max_tokens": 4, "extra_args": extra_args}
            async for output in llm.engine.generate(make_prompt(2, has_image=False), params):
                last = output
            return last

        return await asyncio.gather(one({"slo": slo}), one(None), return_exceptions=True)

    rejected, answered = llm.run(both())
    assert isinstance(rejected, InvalidRequest) and "slo" in str(rejected)
    assert answered.finished
