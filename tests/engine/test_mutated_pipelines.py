"""A mistake at any place of a pipeline that is right is an error before an engine starts, which names the place."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from tests.e2e.graphs.pipelines import GraphsPipeline
from vllm_omni.config import EdgeConfig, OmniConfig, StageConfig, load_config
from vllm_omni.engine.graph_checks import check_graph, publishing_edges
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.pipeline_checks import check_pipeline
from vllm_omni.errors import ConfigError, GraphError
from vllm_omni.flow import Graph, parse_graphs
from vllm_omni.flow.graph.dsl import CallEntry, Interface
from vllm_omni.model_executor.models.diffusers.pipeline import DiffusersPipeline
from vllm_omni.model_executor.models.language.pipeline import LanguagePipeline
from vllm_omni.model_executor.models.qwen2_5_omni import pipeline as qwen2_5_omni
from vllm_omni.model_executor.pipeline import FunctionSpec, Pipeline, StageSpec
from vllm_omni.testing import llava

MORSE = str(Path(__file__).resolve().parents[2] / "examples" / "morse")


def make_qwen() -> Pipeline:
    talker = SimpleNamespace(tts_codec_pad_token_id=1, tts_codec_end_token_id=2)
    dit = SimpleNamespace(block_size=4, repeats=2)
    config: Any = SimpleNamespace(
        thinker_config=None, talker_config=talker, token2wav_config=SimpleNamespace(dit_config=dit)
    )
    with patch.object(qwen2_5_omni, "load_speakers", return_value={"Chelsie": SimpleNamespace(bos_token=1)}):
        return qwen2_5_omni.Qwen2_5OmniPipeline("model", config)


def make_morse() -> Pipeline:
    with patch.object(sys, "path", [MORSE, *sys.path]):
        made: Pipeline = import_module("omni_morse.pipeline").MorsePipeline("model", None)
    return made


def make_diffusers() -> Pipeline:
    config: Any = SimpleNamespace(model_config={"_class_name": "ZImagePipeline"})
    return DiffusersPipeline("model", config)


class Base(NamedTuple):
    make: Callable[[], Pipeline]
    kinds: dict[str, str]  # by stage


NO_CONFIG: Any = None
BASES = {
    "graphs": Base(
        lambda: GraphsPipeline("model", NO_CONFIG), {"writer": "ar", "critic": "ar", "painter": "diffusion"}
    ),
    "qwen": Base(make_qwen, {"thinker": "ar", "talker": "ar", "token2wav": "generation"}),
    "language": Base(lambda: LanguagePipeline("model", NO_CONFIG), {"language": "ar"}),
    "diffusers": Base(make_diffusers, {"diffusion": "diffusion"}),
    "morse": Base(make_morse, {"thinker": "ar", "key": "generation"}),
}


def deploy(kinds: dict[str, str], *edges: EdgeConfig) -> OmniConfig:
    stages: list[Any] = [
        StageConfig(stage_id=index, name=name, model="m", engine_type=kind)  # type: ignore[arg-type]
        for index, (name, kind) in enumerate(kinds.items())
    ]
    return OmniConfig(model="m", model_type="mine", stages=tuple(stages), edges=edges)


def start(pipeline: Pipeline, config: OmniConfig) -> None:
    """What the orchestrator does before it makes engines."""
    check_pipeline(pipeline)
    check_graph(config, pipeline, list(parse_graphs([pipeline.graph, *pipeline.further_graphs]).values()))


class Mutation(NamedTuple):
    place: str  # what the message names; one of several, parted by spaces
    apply: Callable[[Pipeline], Any]
    kinds: dict[str, str] | None = None
    edges: tuple[EdgeConfig, ...] = ()
    what: str = ""  # for ``HARMLESS``


Mutations = Iterator[Mutation]


# -- functions that are none -------------------------------------------------------------------------------------------


async def coroutine(*args: Any) -> Any:
    return args


async def no_arguments() -> AsyncIterator[Any]:
    yield None


async def many_arguments(one: Any, two: Any, three: Any) -> AsyncIterator[Any]:
    yield None


def generator(*args: Any) -> Iterator[Any]:
    yield None


WRONG_GENERATORS: list[Any] = [
    coroutine, generator, no_arguments, many_arguments, lambda *args: None, print, None, "name", 0,
]  # fmt: skip
WRONG_FUNCTIONS: list[Any] = [coroutine, generator, no_arguments, lambda: None, "name", 0]


def set_spec(which: str, pipeline: Pipeline, **values: Any) -> None:
    pipeline.stages = [replace(spec, **values) if spec.name == which else spec for spec in pipeline.stages]


def set_function(which: str, pipeline: Pipeline, **values: Any) -> None:
    pipeline.functions = [replace(spec, **values) if spec.name == which else spec for spec in pipeline.functions]


def set_attribute(name: str, value: Any, pipeline: Pipeline) -> None:
    setattr(pipeline, name, value)


# -- mutations, each at all places -------------------------------------------------------------------------------------

WRONG_ATTRIBUTES: dict[str, list[Any]] = {
    "graph": [None, "graph", []],
    "further_graphs": [None, "graph", [None], 0],
    "stages": [None, [], "stage", ["stage"], [FunctionSpec("tool", no_arguments)]],
    "functions": [None, "tool", [coroutine], {"tool": coroutine}, [StageSpec("tool", "", "text")]],
    "modalities": [None, {}, ["text"], "text", {"text": None}, {"": "text"}, {0: "text"}],
    "extra_outputs": [None, ["text"], "text", {"ids": 1}],
    "sample_rate": [None, -1, "24000", 24000.0, True],
    "chunks": [None, [], {"a->b": None}, {("a", "b"): None}, {("a", "b"): dict}, {("a",): None}],
    "speakers": [None, "Chelsie", [1], 0],
    "session_ttl_s": [0, -1, 0.0, "60", True, float("inf"), float("nan")],
    "speech_stage": [0, "", ["talker"], "nobody"],
    "validate": WRONG_FUNCTIONS,
    "inputs": [*WRONG_FUNCTIONS, lambda prompt: {}],
}


def attributes(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    for name, values in WRONG_ATTRIBUTES.items():
        for value in values:
            yield Mutation(name, partial(set_attribute, name, value))


WRONG_SPEC_FIELDS: dict[str, list[Any]] = {
    "name": [None, "", 0],
    "architecture": [None, 0],
    "output_type": [None, "", "sound", 0],
    "publishing_fields": [None, "rows", ["rows"], frozenset({0}), frozenset({"rowz"})],
    "combine": [None, [], {"unknown": no_arguments}, {0: None}],
    "route": [None, [], {"unknown": no_arguments}, {0: None}],
    "frames": [None, [], {"unknown": None}, {"unknown": int}, {"unknown": coroutine}],
    "engine_args": [None, [], {"max_num_seq": 1}, {"max_num_seqs": "many"}],
    "sampling_params": [None, [], {"max_token": 1}, {"max_tokens": "many"}],
    "check_prompt": WRONG_FUNCTIONS,
    "hf_overrides": [*WRONG_FUNCTIONS, lambda hf_config: hf_config],
}


def stages(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    for spec in pipeline.stages:
        name = spec.name
        place = name if len(kinds) > 1 else "stages"
        yield Mutation(place, lambda made, name=name: set_attribute("stages", _without(made.stages, name), made))
        yield Mutation(name, lambda made, spec=spec: set_attribute("stages", [*made.stages, spec], made))
        yield Mutation(name, partial(set_spec, name, name=f"{name}s"))
        for field, values in WRONG_SPEC_FIELDS.items():
            for value in values:
                yield Mutation(field, lambda made, name=name, new={field: value}: set_spec(name, made, **new))


def functions(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    for spec in pipeline.functions:
        name = spec.name
        yield Mutation(name, lambda made, name=name: set_attribute("functions", _without(made.functions, name), made))
        yield Mutation(name, lambda made, spec=spec: set_attribute("functions", [*made.functions, spec], made))
        as_stage = StageSpec(name, "", "text")
        yield Mutation(name, lambda made, one=as_stage: set_attribute("stages", [*made.stages, one], made))
        yield Mutation(name, lambda made, name=name: set_function(name, made, name=f"{name}s"))
        for wrong in WRONG_GENERATORS:
            yield Mutation(name, lambda made, name=name, wrong=wrong: set_function(name, made, forward=wrong))


def _without(specs: Any, name: str) -> list[Any]:
    return [spec for spec in specs if spec.name != name]


def stage_functions(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    """Of each entry of ``combine`` and ``route``, and of each interface that might have one."""
    plans = parse_graphs([pipeline.graph, *pipeline.further_graphs]).values()
    for spec in pipeline.stages:
        nodes = [node for plan in plans for node in plan.nodes.values() if node.role == spec.name]
        for field in ("combine", "route"):
            given = getattr(spec, field)
            for interface in {node.interface for node in nodes}:
                for wrong in WRONG_GENERATORS:
                    new = {field: {**given, interface: wrong}}
                    yield Mutation(interface, lambda made, name=spec.name, new=new: set_spec(name, made, **new))
        for interface, value in spec.combine.items():
            left_out = {key: one for key, one in spec.combine.items() if key != interface}
            new = {"combine": left_out | {f"{interface}s": value}}
            yield Mutation(interface, lambda made, name=spec.name, new=new: set_spec(name, made, **new))
        for output in {output for node in nodes for output in node.outputs}:
            for wrong in (None, int, coroutine, "Tokens", lambda text: None):
                new = {"frames": {output: wrong}}
                yield Mutation(output, lambda made, name=spec.name, new=new: set_spec(name, made, **new))


def names(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    for attribute in ("modalities", "extra_outputs"):
        given = dict(getattr(pipeline, attribute))
        for name, output in given.items():
            wrong = [
                {key: value for key, value in given.items() if key != name},
                {**given, name: f"{output}s"},
                {**given, f"{name}_too": output},
                *({**given, name: other, kept: output} for kept, other in given.items() if kept != name),
            ]
            for new in wrong:
                what = f"{attribute}: {', '.join(map('='.join, new.items()))}"
                yield Mutation("modalit", partial(set_attribute, attribute, new), what=what)


def deployments(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    for name, kind in kinds.items():
        for other in {"ar", "generation", "diffusion"} - {kind}:
            yield Mutation(name, lambda made: None, {**kinds, name: other})
        renamed = {(f"{one}s" if one == name else one): value for one, value in kinds.items()}
        yield Mutation(name, lambda made: None, renamed)
        if len(kinds) > 1:
            yield Mutation(name, lambda made: None, {one: value for one, value in kinds.items() if one != name})
    yield Mutation("another", lambda made: None, {**kinds, "another": "ar"})


def edges(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    plans = list(parse_graphs([pipeline.graph, *pipeline.further_graphs]).values())
    with_tensors = publishing_edges(plans, {spec.name: spec for spec in pipeline.stages})
    settings: list[dict[str, Any]] = [{"transport": "tcp"}, {"stream": False}, {"credits": 8}]
    for source in kinds:
        for target in kinds:
            for setting in settings:
                is_streamed = kinds[target] == "ar" or "credits" not in setting
                if (source, target) not in with_tensors or not is_streamed:
                    edge = EdgeConfig(source=source, target=target, **setting)
                    yield Mutation(f"{source}->{target}", lambda made: None, edges=(edge,))


def graphs(pipeline: Pipeline, kinds: dict[str, str]) -> Mutations:
    """The statements of each graph."""
    for index, graph in enumerate((pipeline.graph, *pipeline.further_graphs)):
        for name in ("", " ", "two words", None, 0, "tab\t"):
            yield Mutation("graph", _in_graph(index, lambda one, name=name: setattr(one, "name", name)))
        for name in graph.declarations.outputs:
            yield Mutation(name, _in_graph(index, partial(_rename_output, name)))
        for name in graph.declarations.placeholders:
            yield Mutation("placeholder", _in_graph(index, partial(_rename_placeholder, name)))
        for place, call in enumerate(graph.declarations.calls):
            for field, source in call.sources.items():
                changed = {key: value for key, value in call.sources.items() if key != field}
                what = f"{graph.name}: {call.node} without {field}"
                yield Mutation(
                    f"{call.node} {source.node}",
                    _in_graph(index, partial(_set_call, place, sources=changed)),
                    what=what,
                )
                for wrong in WRONG_GENERATORS if source.transfer is not None else ():
                    if wrong is not None:
                        new = {**call.sources, field: replace(source, transfer=wrong)}
                        yield Mutation(call.node, _in_graph(index, partial(_set_call, place, sources=new)))
    for graph in pipeline.further_graphs:
        double = copy(graph)
        yield Mutation(graph.name, partial(set_attribute, "further_graphs", [*pipeline.further_graphs, double]))


def _in_graph(index: int, change: Callable[[Graph], Any]) -> Callable[[Pipeline], Any]:
    return lambda made: change((made.graph, *made.further_graphs)[index])


def _set_call(place: int, graph: Graph, **values: Any) -> None:
    calls: list[CallEntry] = graph.declarations.calls
    calls[place] = replace(calls[place], **values)


def _rename_output(name: str, graph: Graph) -> None:
    outputs = graph.declarations.outputs
    outputs[f"{name}_too"] = outputs.pop(name)


def _rename_placeholder(name: str, graph: Graph) -> None:
    placeholders = graph.declarations.placeholders
    placeholders[f"{name}s"] = placeholders.pop(name)


KINDS = [attributes, stages, functions, stage_functions, names, deployments, edges, graphs]

HARMLESS = {
    "modalities: text=comment, image=image, comment=text": "both are texts of the same kind",
    "critique: painter.paint without advice": "a picture and a comment about it, without the loop",
    "retouched: painter.retouch without advice": "likewise",
}


def drop_publishing_field(pipeline: Pipeline) -> None:
    set_spec("thinker", pipeline, publishing_fields=frozenset())


def name_with_slash(pipeline: Pipeline) -> None:
    pipeline.further_graphs[0].name = "family/diamond"


def without_route(pipeline: Pipeline) -> None:
    set_spec("writer", pipeline, route={})


def without_sessions(pipeline: Pipeline) -> None:
    pipeline.session_ttl_s = None


def combine_of_one_field(pipeline: Pipeline) -> None:
    writer = next(spec for spec in pipeline.stages if spec.name == "writer")
    set_spec("writer", pipeline, combine={**writer.combine, "write": writer.combine["merge"]})


@pytest.mark.parametrize(
    ("base", "apply", "reason"),
    [
        ("qwen", drop_publishing_field, "a transfer function of the pipeline's own may do without tensors"),
        ("graphs", name_with_slash, "models have such names"),
        ("graphs", without_route, "each field gets every output, and a transfer function may end the loop"),
        ("graphs", without_sessions, "a session then lasts as long as its request"),
        ("graphs", combine_of_one_field, "it may make several requests of one input"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_only_looks_like_a_mistake_is_served(base: str, apply: Callable[[Pipeline], Any], reason: str) -> None:
    pipeline = BASES[base].make()
    apply(pipeline)
    start(pipeline, deploy(BASES[base].kinds))


@pytest.mark.parametrize("base", BASES)
def test_the_pipelines_are_right_as_they_are(base: str) -> None:
    start(BASES[base].make(), deploy(BASES[base].kinds))


@pytest.mark.parametrize("mutate", KINDS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("base", BASES)
def test_each_mistake_is_an_error_that_names_its_place(base: str, mutate: Callable[..., Mutations]) -> None:
    make, kinds = BASES[base]
    silent = []
    for mutation in mutate(make(), kinds):
        pipeline = make()
        try:
            mutation.apply(pipeline)
            start(pipeline, deploy(mutation.kinds or kinds, *mutation.edges))
        except (GraphError, ConfigError) as exc:
            if not any(place.lower() in str(exc).lower() for place in mutation.place.split()):
                silent.append((mutation.place, str(exc)))
        except Exception as exc:
            silent.append((mutation.place, repr(exc)))
        else:
            if mutation.what not in HARMLESS:
                silent.append((mutation.place, f"is not noticed: {mutation}"))
    assert silent == []


def _interfaces(pipeline: Pipeline) -> Iterator[tuple[type, Interface]]:
    for graph in (pipeline.graph, *pipeline.further_graphs):
        for call in graph.declarations.calls:
            role = graph.declarations.roles[call.role]
            if role.graph is None:  # otherwise that graph declares it
                yield role.role_class, call.interface


def _without_field(interface: Interface, field: str, new: str | None) -> Callable[[], Interface]:
    """The interface without a field, or with another name for it."""
    renamed = {field: new}
    groups = [[renamed.get(one, one) for one in group] for group in interface.inputs_or]
    inputs_or = [[one for one in group if one is not None] for group in groups]
    outputs = {renamed.get(name, name): one for name, one in interface.outputs.items()}
    outputs.pop(None, None)
    counts = {name: count for name, count in interface.activate_by_count.items() if name != field}
    changes: Any = {"inputs_or": inputs_or, "outputs": outputs, "activate_by_count": counts}
    return lambda: replace(interface, **changes)


@pytest.mark.parametrize("base", BASES)
def test_an_interface_without_a_field_that_a_call_names_is_an_error(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, kinds = BASES[base]
    silent = []
    for role, interface in _interfaces(make()):
        for field in {*interface.outputs, *interface.input_names}:
            for new in (None, f"{field}_too"):
                try:
                    with monkeypatch.context() as patched:
                        changed = _without_field(interface, field, new)()
                        changed.__set_name__(role, interface.name)
                        patched.setattr(role, interface.name, changed)
                        start(make(), deploy(kinds))
                except GraphError as exc:
                    if field not in str(exc) and "interface(" not in str(exc):
                        silent.append((role, interface.name, field, str(exc)))
                else:
                    silent.append((role, interface.name, field, "is not noticed"))
    assert silent == []


def test_the_orchestrator_checks_before_it_makes_engines(tmp_path: Path) -> None:
    class Wrong(GraphsPipeline):
        session_ttl_s = 0.0

    model = llava.build(tmp_path / "model")
    with pytest.raises(GraphError, match=r"Wrong.session_ttl_s = 0.0: must be a number of seconds above 0"):
        Orchestrator(load_config(model, pipeline=Wrong))
