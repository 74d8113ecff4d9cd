"""A request as instances are sent it, and which replies another instance can continue."""

from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_omni.engine.instance_request import InstanceRequest, may_resume
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.router import RequestState
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.model_executor.pipeline import RequestContext


def make_request(**params: Any) -> InstanceRequest:
    context = RequestContext("r", {}, {})
    state = RequestState(RequestSize(0, 3, 10))
    return InstanceRequest(context, "r-llm", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(**params), state)


def make_output(*tokens: int, logprob: float | None = None, finished: bool = False) -> OmniRequestOutput:
    completion = CompletionOutput(0, "", list(tokens), logprob, None)
    return OmniRequestOutput.of(RequestOutput("r", None, [1, 2, 3, *tokens], None, [completion], finished=finished))


def test_a_reply_is_resumed_where_the_next_token_depends_on_those_before_it_alone() -> None:
    for params, may in [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=0, extra_args={SLO_ARGS: {"ttft_ms": 1}}), True),
        (SamplingParams(temperature=1), True),  # without a seed, no particular random numbers were promised
        (SamplingParams(temperature=1, seed=1), False),
        (SamplingParams(temperature=0, seed=1), True),
        (SamplingParams(temperature=0, presence_penalty=1), False),
        (SamplingParams(temperature=0, stop=["x"]), False),
        (SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["a"])), False),
        (SamplingParams(temperature=1, n=2), False),
    ]:
        assert may_resume(params) is may, params


def test_a_resumed_reply_continues_behind_the_tokens_that_the_user_has() -> None:
    request = make_request(max_tokens=10, min_tokens=4, extra_args={"x": 1})
    prompt, params = request.with_reply({"ec": {}})
    assert (prompt, params.max_tokens, params.extra_args) == (request.prompt, 10, {"x": 1, "ec": {}})
    request.add_output(make_output(7, 8, logprob=-2.0), earlier_logprob=0.0)
    assert request.state.num_given == 2
    prompt, params = request.with_reply({})
    assert prompt["prompt_token_ids"] == [1, 2, 3, 7, 8]
    assert (params.max_tokens, params.min_tokens) == (8, 2)
    output = make_output(9, logprob=-1.0, finished=True)
    output.kv_transfer_params = {"pages": 1}
    request.add_output(output, earlier_logprob=request.cumulative_logprob)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.outputs[0].cumulative_logprob == -3.0
    assert output.kv_transfer_params is None


def test_a_task_without_reply_follows_the_slo_alone() -> None:
    request = make_request(max_tokens=10, temperature=1.0, extra_args={SLO_ARGS: {"ttft_ms": 1}, "x": 1})
    params = request.without_reply({"ec": {}})
    assert (params.max_tokens, params.temperature) == (1, 0.0)
    assert params.extra_args == {SLO_ARGS: {"ttft_ms": 1}, "ec": {}}


def test_each_assignment_has_an_id_of_its_own() -> None:
    request = make_request()
    request.state.num_assignments = 1
    assert request.task_id == "r-llm"
    request.state.num_assignments = 2
    assert request.task_id == "r-llm-t2"
