"""Outputs that the user receives, made from the frames of a call."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.engine.answer import Answer
from vllm_omni.engine.latency_metrics import LatencyMetrics, RequestLatency
from vllm_omni.flow import OutputFrame
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import RequestContext

OUTPUTS = {"text": "reply", "audio": "speech", "codec_ids": "codes"}


def make_pipeline() -> Any:
    return SimpleNamespace(
        sample_rate=24_000,
        modalities={"text": "reply", "audio": "speech"},
        extra_output=lambda name, output: [name, output.outputs[0].token_ids],
    )


@pytest.fixture
def answer() -> Answer:
    context = RequestContext("user-1", {}, {}, stage_durations={"thinker": 2.0})
    latency = RequestLatency(context, "thinker", {}, LatencyMetrics())
    return Answer(make_pipeline(), context, OUTPUTS, latency)


def make_payload(**values: Any) -> OmniRequestOutput:
    completion = CompletionOutput(0, "a", [7], None, None)
    payload = OmniRequestOutput.of(RequestOutput("stage-1", None, [1], None, outputs=[completion], finished=False))
    payload.multimodal_output = values
    return payload


def test_text_is_the_stages_output_under_the_users_id(answer: Answer) -> None:
    payload = make_payload()
    output = answer.output_of(OutputFrame("reply", payload, 0, last=False))
    assert (output.request_id, output.finished, output.outputs[0].token_ids) == ("user-1", False, [7])
    output.outputs[0].token_ids += [8]
    assert payload.outputs[0].token_ids == [7], "the next stage reads the payload"


def test_other_modalities_have_values_and_no_text(answer: Answer) -> None:
    audio = answer.output_of(OutputFrame("speech", make_payload(audio=torch.ones(3)), 0, last=False))
    assert audio.outputs == [] and audio.multimodal_output["sample_rate"] == 24_000
    assert audio.multimodal_output["audio"].tolist() == [1, 1, 1]
    codes = answer.output_of(OutputFrame("codes", make_payload(), 0, last=False))
    assert codes.multimodal_output == {"codec_ids": ["codec_ids", [7]]}


def test_a_branch_without_output_gives_an_empty_value(answer: Answer) -> None:
    audio = answer.output_of(OutputFrame("speech", None, 0, last=True)).multimodal_output
    assert audio["audio"].numel() == 0 and audio["sample_rate"] == 24_000
    assert answer.output_of(OutputFrame("codes", None, 0, last=True)).multimodal_output == {"codec_ids": []}


def test_the_last_output_of_all_modalities_has_the_times(answer: Answer) -> None:
    outputs = [answer.output_of(OutputFrame(field, None, 0, last=True)) for field in OUTPUTS.values()]
    assert [output.finished for output in outputs] == [False, False, True]
    assert outputs[0].stage_durations == {"thinker": 2.0}
    assert set(outputs[-1].stage_durations) == {"thinker", "total"}
