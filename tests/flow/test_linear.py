import pytest

from tests.flow.builders import FunctionNode, read_payloads
from vllm_omni.errors import GraphError
from vllm_omni.flow import Emission, Field, GraphParser
from vllm_omni.flow.linear import LinearStage, linear_graph

TEXT = Field("text", streamed=True)
STAGES = [
    LinearStage("thinker", TEXT, final_output=True),
    LinearStage("talker", TEXT, ("thinker",)),
    LinearStage("mixer", TEXT, ("thinker", "talker"), final_output=True),
]


async def pass_on(activation):
    for name, chunks in activation.inputs.items():
        async for chunk in chunks:
            yield Emission("output", f"{activation.node.split('.')[0]}({name}:{chunk.payload})")


async def test_stages_run_as_the_graph_that_they_stand_for(make_runtime):
    runtime = make_runtime(linear_graph("g", STAGES), {stage.name: FunctionNode(pass_on) for stage in STAGES})
    payloads = await read_payloads(runtime.open("c", {"prompt": "x"}, {"mixer"}))
    assert [payload for payload in payloads["mixer"] if payload] == [
        "mixer(thinker:thinker(prompt:x))",
        "mixer(talker:talker(thinker:thinker(prompt:x)))",
    ]


def test_stage_with_two_sources_is_a_join():
    plan = GraphParser(linear_graph("g", STAGES)).parse()
    assert plan.nodes["mixer.generate"].groups[0].root == "thinker.generate"
    assert set(plan.outputs) == {"thinker", "mixer"}


def test_source_that_does_not_stand_before_is_refused():
    with pytest.raises(GraphError, match="stage 'talker': no stage 'thinkr' before it; did you mean 'thinker'"):
        linear_graph("g", [STAGES[0], LinearStage("talker", TEXT, ("thinkr",), final_output=True)])


def test_stages_without_a_final_output_are_refused():
    with pytest.raises(GraphError, match="no stage has final_output=True"):
        linear_graph("g", [LinearStage("thinker", TEXT)])


def test_stage_named_twice_is_refused():
    with pytest.raises(GraphError, match="role 'thinker' is declared twice"):
        linear_graph("g", [STAGES[0], STAGES[0]])
