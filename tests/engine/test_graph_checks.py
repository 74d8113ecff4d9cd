"""What a pipeline's author can get wrong, and what the graph language has and a server does not: errors at start."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.graphs.pipelines import GraphsPipeline
from vllm_omni.config import EdgeConfig, OmniConfig, StageConfig
from vllm_omni.engine.graph_checks import check_graph, whole_fields
from vllm_omni.engine.pipeline_checks import check_pipeline
from vllm_omni.errors import ConfigError, GraphError, PlanError
from vllm_omni.flow import (
    Activation,
    CallInfo,
    Chunk,
    Emission,
    Field,
    GlobalParameters,
    Graph,
    GraphParser,
    Role,
    Scheduling,
    StaticPlan,
    interface,
    parse_graphs,
)
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.frames import Tokens
from vllm_omni.model_executor.models.qwen2_5_omni.windows import WindowSizes
from vllm_omni.model_executor.pipeline import FunctionSpec, Pipeline, SpeechPrompt, StageSpec
from vllm_omni.model_executor.routes import ByKind

TEXT, ROWS, CODES = (Field(name, streamed=True) for name in ("text", "rows", "codes"))


class Thinker(Role):
    generate = interface([["prompt"], ["draft"]], {"text": TEXT, "rows": ROWS})


class Talker(Role):
    generate = interface([["rows"]], {"codes": CODES})


class Spread(Role):
    generate = interface([["rows"]], {"codes": CODES}, scheduling=Scheduling.BROADCAST)


class EachRow(Role):
    generate = interface([["rows"]], {"codes": CODES}, inputs={"rows": Field("rows")})


class Drafter(Role):
    draft = interface([["prompt"]], {"text": Field("text"), "notes": TEXT})


class Joiner(Role):
    join = interface([["text", "codes"]], {"codes": CODES})


async def convert(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield chunk


def chain(graph: Graph, talker: Callable[..., Any] = Talker, prompt: str = "prompt") -> Any:
    reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder(prompt))
    codes = graph.role(talker, "talker").generate(rows=reply.rows.via(convert)).codes  # type: ignore[arg-type]
    graph.output(text=reply.text, codes=codes)
    return reply, codes


def join(graph: Graph) -> None:
    reply, codes = chain(graph)
    joined = graph.role(Joiner, "joiner").join(text=reply.text.via(convert), codes=codes.via(convert))
    graph.output(joined=joined.codes)


def with_call(graph: Graph) -> None:
    chain(graph)
    graph.graph_call("speak", ["codes"])


def with_parameters(graph: Graph) -> None:
    history = GlobalParameters("history", list)
    reply = graph.role(Thinker, "thinker", parameters=[history]).generate(prompt=graph.placeholder("prompt"))
    graph.output(text=reply.text, codes=graph.role(Talker, "talker").generate(rows=reply.rows.via(convert)).codes)


def without_transfer(graph: Graph) -> None:
    reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
    graph.output(text=reply.text, codes=graph.role(Talker, "talker").generate(rows=reply.rows).codes)


def roles_of(plans: list[StaticPlan]) -> set[str]:
    return {role for plan in plans for role in plan.roles}


def check(
    build: Callable[[Graph], Any] = chain,
    *,
    specs: Any = None,
    stages: Any = None,
    kinds: Any = None,
    edges: Any = (),
    **pipeline: Any,
) -> None:
    graph = Graph("speech")
    build(graph)
    plans = list(parse_graphs([graph]).values())
    plan = plans[0]
    functions, processes = pipeline.pop("functions", {}), pipeline.pop("processes", 0)
    spec = {"thinker": {"publishing_fields": frozenset({"rows"})}} | (specs or {})
    names = stages or sorted(roles_of(plans) - set(functions), key=["thinker", "talker", "joiner"].index)

    class Made(Pipeline):
        modalities = {"text": "text"}
        extra_outputs = {"codes": "codes"} | ({"joined": "joined"} if "joined" in plan.outputs else {})

        def __init__(self) -> None:
            self.graph = graph
            self.stages = [StageSpec(name, "Class", **{"output_type": "text"} | spec.get(name, {})) for name in names]
            self.functions = [FunctionSpec(name, one, processes) for name, one in functions.items()]

        def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
            return {}

        def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
            return SpeechPrompt("", "", "", text)

        def extra_output(self, name: str, output: OmniRequestOutput) -> Any:
            return output.outputs

    made = Made()
    for name, value in pipeline.items():
        setattr(made if name != "inputs" else Made, name, value)
    deployed = [
        StageConfig(stage_id=index, name=name, model="m", engine_type=(kinds or {}).get(name, "ar"))
        for index, name in enumerate(names)
    ]
    config = OmniConfig(model="m", model_type="speech", stages=tuple(deployed), edges=tuple(edges))
    check_pipeline(made)
    check_graph(config, made, plans)


def test_a_chain_of_stages_is_served() -> None:
    check()


async def combine(activation: Activation) -> AsyncIterator[Chunk]:
    yield Chunk(None)


async def emit(activation: Activation) -> AsyncIterator[Emission]:
    yield Emission("codes", None)


def test_a_join_of_stages_is_served_with_a_function_that_combines() -> None:
    check(join, specs={"joiner": {"combine": {"join": combine}}})


def test_a_function_reads_and_makes_any_field() -> None:
    check(join, functions={"joiner": emit})
    check(without_transfer, functions={"talker": emit}, specs={"thinker": {}})
    with pytest.raises(GraphError, match="'rows' is read by the function 'talker', which reads no tensors"):
        check(without_transfer, functions={"talker": emit})


class Emitter:
    async def emit(self, activation: Activation) -> AsyncIterator[Emission]:
        yield Emission("codes", None)

    @staticmethod
    async def emit_alone(activation: Activation) -> AsyncIterator[Emission]:
        yield Emission("codes", None)


def test_a_function_of_a_module_may_have_processes_of_its_own() -> None:
    check(join, functions={"joiner": emit}, processes=2)
    check(join, functions={"joiner": Emitter.emit_alone}, processes=2)


def test_a_function_that_no_other_process_finds_has_no_processes_of_its_own() -> None:
    async def closure(activation: Activation) -> AsyncIterator[Emission]:
        yield Emission("codes", None)

    for function in (closure, Emitter().emit):
        with pytest.raises(GraphError, match=r"function 'joiner': .* cannot run in a process of its own: .*:.*; use a"):
            check(join, functions={"joiner": function}, processes=1)
        check(join, functions={"joiner": function})
    with pytest.raises(GraphError, match=r"function 'joiner': processes = -1: must be a number of processes, or 0"):
        check(join, functions={"joiner": emit}, processes=-1)


def test_a_function_that_shares_parameters_has_no_processes_of_its_own() -> None:
    def build(graph: Graph) -> None:
        reply, codes = chain(graph)
        joiner = graph.role(Joiner, "joiner", parameters=[GlobalParameters("history", list)])
        graph.output(joined=joiner.join(text=reply.text.via(convert), codes=codes.via(convert)).codes)

    check(build, functions={"joiner": emit})
    with pytest.raises(GraphError, match=r"function 'joiner' shares the GlobalParameters history, which are in the fr"):
        check(build, functions={"joiner": emit}, processes=1)


def test_sessions_and_further_placeholders_are_served() -> None:
    check(with_parameters)
    check(lambda graph: chain(graph, prompt="question"), inputs=lambda self, prompt, options: {})


def per_frame(graph: Graph) -> None:
    reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
    spoken = graph.role(EachRow, "talker").generate(rows=reply.rows.via(convert))
    graph.output(text=reply.text, codes=spoken.codes)


def test_a_reader_of_single_frames_needs_to_know_what_a_frame_is() -> None:
    with pytest.raises(GraphError, match=r"rows -> talker.generate.rows: its reader runs once for each frame"):
        check(per_frame)
    check(per_frame, specs={"thinker": {"frames": {"rows": Tokens}}})


def test_fields_that_are_not_streamed_are_known() -> None:
    graph = Graph("g")
    text = graph.role(Drafter, "drafter").draft(prompt=graph.placeholder("prompt")).text
    graph.output(text=text)
    assert whole_fields("drafter", [GraphParser(graph).parse()]) == {"draft": {"text"}}


def loop(graph: Graph) -> None:
    thinker = graph.role(Thinker, "thinker")
    reply = thinker.generate(prompt=graph.placeholder("prompt"))
    thinker.generate(draft=reply.text.via(convert))
    graph.output(text=reply.text, codes=graph.role(Talker, "talker").generate(rows=reply.rows.via(convert)).codes)


def calling(transfer: Any = convert, each: bool = False) -> Callable[[Graph], None]:
    """The talker is in a graph of its own, which reads the rows of the thinker."""

    def build(graph: Graph) -> None:
        speech = Graph("speaking")
        rows = speech.placeholder("rows", Field("rows") if each else None)
        speech.output(codes=speech.role(Talker, "talker").generate(rows=rows).codes)
        speech.graph_call("speak", ["codes"])
        reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
        rows = reply.rows if transfer is None else reply.rows.via(transfer)
        graph.output(text=reply.text, codes=graph.graph_ref(speech).speak(rows=rows).codes)

    return build


def test_graph_calls_are_served() -> None:
    check(with_call)
    check(calling())
    edge = EdgeConfig(source="thinker", target="talker", transport="tcp")
    check(calling(), edges=[edge])
    with pytest.raises(ConfigError, match="stream = True: it leads from one graph into another, which reads whole"):
        check(calling(), edges=[replace(edge, stream=True)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (calling(each=True, transfer=None), r"thinker.generate.rows -> talker.generate.rows: its reader runs once for"),
        (calling(print), r"edge thinker.generate.rows -> speaking.speak.rows: print: must be an async generator"),
    ],
)
def test_an_edge_into_another_graph_is_checked_with_what_reads_it(build: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check(build)


def test_a_loop_of_stages_is_served() -> None:
    check(loop)


def constant(graph: Graph, field: str = "rows") -> None:
    class Reviser(Role):
        generate = interface([["prompt"], ["draft", "source"]], {"text": TEXT, "codes": CODES})

    thinker = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
    reviser = graph.role(Reviser, "talker")
    reply = reviser.generate(prompt=thinker.text.via(convert))
    reviser.generate(draft=reply.text.via(convert), source=getattr(thinker, field).via(convert))
    graph.output(text=reply.text, codes=reply.codes)


def test_a_loop_of_stages_reads_constants() -> None:
    talker = {"combine": {"generate": combine}}
    check(lambda graph: constant(graph, "text"), specs={"thinker": {}, "talker": talker})
    check(constant, specs={"talker": talker})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda graph: chain(graph, Spread), r"'talker.generate': scheduling BROADCAST: .* a server answers it once"),
        (lambda graph: chain(graph, prompt="question"), r"has the placeholders question: .* override Pipeline.inputs"),
    ],
    ids=["scheduling", "placeholder"],
)
def test_what_a_server_does_not_support_is_rejected(build: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(build, specs={"talker": {"combine": {"generate": combine}}})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"build": join}, r"'joiner.join' joins text and codes: give `combine` .* function for 'join'"),
        ({"specs": {"talker": {"combine": {"join": combine}}}}, r"'talker': combine: no interface 'join'"),
        ({"specs": {"talker": {"route": {"generat": ByKind()}}}}, r"route: no interface 'generat'; did you mean"),
        ({"specs": {"thinker": {"frames": {"row": Tokens}}}}, r"frames: no output 'row'; did you mean 'rows'"),
        ({"functions": {"talker": emit}, "stages": ["thinker", "talker"]}, r"has 'talker' twice"),
        ({"build": without_transfer}, r"thinker.generate.rows -> talker.generate.rows has no transfer function"),
        ({"stages": ["thinker"]}, r"no stage for role 'talker': add a StageSpec, or a FunctionSpec; .*valid: thinker"),
        ({"stages": ["thinker", "talker", "joiner"]}, r"has no role for 'joiner'"),
        ({"stages": ["talker", "thinker"]}, r"the first stage, 'talker', does not read the prompt"),
        ({"specs": {"talker": {"output_type": "sound"}}}, r"'talker': output_type 'sound'; .*valid: text"),
        (
            {"specs": {"thinker": {"publishing_fields": frozenset({"row"})}}},
            r"publishing_fields: no output 'row'; did you mean 'rows'",
        ),
        ({"modalities": {"text": "texts"}}, r"modality 'text': the graph has no output 'texts'; did you mean 'text'"),
        (
            {"modalities": {"text": "text", "reply": "text"}},
            r"modalities 'text' and 'reply' both name the output 'text'",
        ),
        ({"extra_outputs": {"ids": "ids"}}, r"modality 'ids': the graph has no output 'ids'"),
        (
            {"modalities": {"text": "text", "audio": "codes"}, "extra_outputs": {}, "sample_rate": 8000},
            r"modality 'audio': output 'codes' is 'text' of 'talker'; must be audio",
        ),
        (
            {"specs": {"talker": {"output_type": "text+image"}}},
            r"stage 'talker' has text and images: declare which of them field 'codes' is",
        ),
        (
            {"specs": {"thinker": {"output_type": "audio"}}, "kinds": {"thinker": "generation"}},
            r"field 'text' is declared 'text', and the output_type of stage 'thinker' is 'audio', which has audio or",
        ),
        ({"specs": {"talker": {"check_prompt": print}}}, r"'talker': check_prompt: only the first stage reads"),
        (
            {"chunks": {("talker", "thinker"): WindowSizes()}},
            r"chunks: the graph has no edge talker->thinker; it has thinker->",
        ),
        (
            {"speech_stage": "speaker", "modalities": {"text": "text", "audio": "codes"}, "extra_outputs": {}},
            r"speech_stage: no stage 'speaker'",
        ),
    ],
)
def test_a_pipeline_that_contradicts_itself_is_rejected(wrong: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check(**wrong)


def spoken(graph: Graph) -> None:
    class Vocoder(Role):
        decode = interface([["codes"]], {"audio": Field("audio", streamed=True)})

    reply = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt"))
    made = graph.role(Vocoder, "talker").decode(codes=reply.rows.via(convert))
    graph.output(text=reply.text, audio=made.audio)


def test_sound_needs_the_rate_of_its_samples() -> None:
    rest: dict[str, Any] = {
        "specs": {"talker": {"output_type": "audio"}},
        "kinds": {"talker": "generation"},
        "modalities": {"text": "text", "audio": "audio"},
        "extra_outputs": {},
    }
    check(spoken, sample_rate=24_000, **rest)
    with pytest.raises(GraphError, match=r"Made.sample_rate = 0: modality 'audio' needs the samples per second"):
        check(spoken, **rest)


def test_a_served_name_cannot_be_that_of_a_further_graph_or_a_graph_call() -> None:
    pipeline = GraphsPipeline("model", Any)  # type: ignore[arg-type]
    plans = list(parse_graphs([pipeline.graph, *pipeline.further_graphs]).values())
    kinds: dict[str, Any] = {"writer": "ar", "critic": "ar", "painter": "diffusion"}
    cases: dict[Any, Any] = {"diamond": ["tiny", "diamond"], "agent": "agent", "critique.review": ["critique.review"]}
    for wrong, names in (*cases.items(), (None, ["tiny"]), (None, ["plain"])):
        stages = [
            StageConfig(stage_id=index, name=name, model="m", engine_type=kind)
            for index, (name, kind) in enumerate(kinds.items())
        ]
        stages[0] = replace(stages[0], engine_args={"served_model_name": names})
        config = OmniConfig(model="m", model_type="graphs", stages=tuple(stages))
        if wrong is None:
            check_graph(config, pipeline, plans)
            continue
        with pytest.raises(ConfigError, match=f"served_model_name = '{wrong}': one of the pipeline's graphs has this"):
            check_graph(config, pipeline, plans)


def test_settings_of_an_edge_without_tensors_are_rejected() -> None:
    edge = EdgeConfig(source="thinker", target="talker", transport="tcp", stream=False, credits=8)
    check(edges=[replace(edge, credits=256)])
    check(edges=[replace(edge, stream=True)])
    check(edges=[replace(edge, stream="auto")])
    with pytest.raises(ConfigError, match="edge thinker->talker: credits = 8 has no effect: stream is false"):
        check(edges=[edge])
    for key in ("transport", "stream", "credits"):
        one = EdgeConfig(source="thinker", target="talker", **{key: getattr(edge, key)})
        with pytest.raises(ConfigError, match=rf"edge thinker->talker: {key} = .* has no effect.*travel on no edge"):
            check(specs={"thinker": {}}, edges=[one])


@pytest.mark.parametrize(
    ("setting", "kinds", "message"),
    [
        ({"stream": True, "transport": "inline"}, {}, "stream = True: the transport 'inline' has no streams"),
        ({"credits": 8, "transport": "cuda_ipc"}, {}, "credits = 8 has no effect: the transport 'cuda_ipc' has no"),
        ({"stream": True}, {"talker": "generation"}, "stream = True: rows are streamed between two ar stages, and tal"),
        ({"credits": 8}, {"talker": "generation"}, "credits = 8 has no effect: rows are streamed between two ar"),
    ],
)
def test_a_stream_where_none_is_possible_is_rejected(setting: Any, kinds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"edge thinker->talker: {message}"):
        specs = {name: {"output_type": "latents"} for name in kinds}
        check(kinds=kinds, specs=specs, edges=[EdgeConfig(source="thinker", target="talker", **setting)])


def test_an_edge_that_the_graph_has_not_is_rejected() -> None:
    with pytest.raises(ConfigError, match="edge talker->thinker: the graph has no such edge; it has thinker->talker"):
        check(edges=[EdgeConfig(source="talker", target="thinker")])
