"""Edges on which a KV cache travels: what is rejected before an engine starts. With engines: tests/e2e/."""

import runpy
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.text_model import make_config
from vllm_omni.config import EdgeConfig, OmniConfig, StageConfig, load_config
from vllm_omni.engine.cache_edges import CacheSource, cache_sources, check_layouts, with_connectors
from vllm_omni.engine.engine_maker import check_default_params
from vllm_omni.engine.graph_checks import check_graph
from vllm_omni.engine.pipeline_checks import check_pipeline
from vllm_omni.engine.relay_options import make_relay_options
from vllm_omni.engine.request_caches import RequestCaches, check_given, check_prompt
from vllm_omni.engine.request_params import check_params
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError, GraphError, InvalidRequest
from vllm_omni.flow import Activation, CallInfo, Chunk, Emission, Field, Graph, Role, interface, parse_graphs
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, TensorRef, encode
from vllm_omni.messages.request import PromptCache
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.frames import Whole
from vllm_omni.model_executor.pipeline import FunctionSpec, StageRequest, StageSpec
from vllm_omni.model_executor.transfers import pass_cache
from vllm_omni.testing import deepseek_v2

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/prefill_decode.py"
KV = "kv_transfer_params"
TEXT = Field("text", streamed=True)
CACHE = frozenset({"cache"})
ANNOUNCED = {"do_remote_prefill": True, "pages": encode(Payload({"0/0/0": TensorRef("inline", (0,), "uint8", b"")}))}

PrefillDecode: Any = runpy.run_path(str(EXAMPLE))["PrefillDecode"]


class Prefill(Role):
    read = interface([["prompt"]], {"cache": Field("kv_cache"), "other": Field("kv_cache"), "text": TEXT})


class Streaming(Role):
    read = interface([["prompt"]], {"cache": Field("kv_cache", streamed=True)})


class Decode(Role):
    reply = interface([["cache"]], {"text": TEXT, "cache": Field("kv_cache")})
    again = interface([["cache"]], {"text": TEXT})


async def emit(activation: Activation) -> AsyncIterator[Emission]:
    yield Emission("text", "")


async def own_transfer(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in pass_cache(chunks):
        yield chunk


def chain(graph: Graph, prefill: type[Role] = Prefill, transfer: Any = pass_cache) -> Any:
    read: Any = graph.role(prefill, "prefill").read(prompt=graph.placeholder("prompt"))
    graph.output(text=graph.role(Decode, "decode").reply(cache=read.cache.via(transfer)).text)  # type: ignore[attr-defined]
    return read


def check(
    build: Callable[[Graph], Any] = chain,
    specs: dict[str, Any] | None = None,
    stages: dict[str, Any] | None = None,
    functions: tuple[str, ...] = (),
    edges: tuple[EdgeConfig, ...] = (),
) -> None:
    pipeline = PrefillDecode("m", None)
    pipeline.graph = Graph("g")
    build(pipeline.graph)
    plans = list(parse_graphs([pipeline.graph]).values())
    names = [name for name in ("prefill", "decode", "third") if name in plans[0].roles and name not in functions]
    given = {"prefill": {"cache_fields": CACHE}} | (specs or {})
    pipeline.stages = [StageSpec(name, "", **{"output_type": "text"} | given.get(name, {})) for name in names]
    pipeline.functions = [FunctionSpec(name, emit) for name in functions]
    deployed = tuple(
        StageConfig(stage_id=index, name=name, **{"model": "m"} | (stages or {}).get(name, {}))
        for index, name in enumerate(names)
    )
    check_pipeline(pipeline)
    check_graph(OmniConfig(model="m", model_type="g", stages=deployed, edges=edges), pipeline, plans)


def test_a_prompts_cache_is_read_by_a_stage_that_continues_behind_it() -> None:
    check()
    check(lambda graph: chain(graph, transfer=own_transfer))


def streamed(graph: Graph) -> None:
    chain(graph, Streaming)


def unread(graph: Graph) -> None:
    graph.output(text=graph.role(Prefill, "prefill").read(prompt=graph.placeholder("prompt")).text)  # type: ignore[attr-defined]


def answered(graph: Graph) -> None:
    graph.output(cache=chain(graph).cache)


def passed_on(graph: Graph) -> None:
    replied: Any = graph.role(Decode, "decode").reply(
        cache=graph.role(Prefill, "prefill").read(prompt=graph.placeholder("prompt")).cache.via(pass_cache)  # type: ignore[attr-defined]
    )
    graph.output(text=graph.role(Decode, "third").reply(cache=replied.cache.via(pass_cache)).text)  # type: ignore[attr-defined]


def of_two(graph: Graph) -> None:
    prompt, decode = graph.placeholder("prompt"), graph.role(Decode, "decode")
    first = graph.role(Prefill, "prefill").read(prompt=prompt).cache.via(pass_cache)  # type: ignore[attr-defined]
    second = graph.role(Prefill, "third").read(prompt=prompt).cache.via(pass_cache)  # type: ignore[attr-defined]
    graph.output(text=decode.reply(cache=first).text)  # type: ignore[attr-defined]
    graph.output(other=decode.again(cache=second).text)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"build": streamed}, r"'prefill': cache_fields: 'cache' is streamed: a prompt has one KV cache"),
        ({"build": unread}, r"'prefill': cache_fields: 'cache' is read by no stage: leave the field out"),
        ({"functions": ("decode",)}, r"'cache' is read by the function 'decode', which reads no KV cache"),
        ({"specs": {"prefill": {}}}, r"pass_cache: add 'cache' to cache_fields of the StageSpec of 'prefill'"),
        (
            {"specs": {"prefill": {"cache_fields": frozenset({"cash"})}}},
            r"cache_fields: no output 'cash'; did you mean",
        ),
        (
            {"build": passed_on, "specs": {"prefill": {"cache_fields": CACHE}, "decode": {"cache_fields": CACHE}}},
            r"is read by 'decode', which has cache_fields itself",
        ),
        (
            {"build": of_two, "specs": {"prefill": {"cache_fields": CACHE}, "third": {"cache_fields": CACHE}}},
            r"'decode' reads KV caches of 'prefill' and 'third': its sampling parameters are those of one",
        ),
    ],
)
def test_a_graph_that_misuses_a_cache_is_rejected(wrong: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check(**wrong)


def test_a_cache_is_no_answer() -> None:
    with pytest.raises(
        GraphError,
        match=r"output 'cache' is a KV cache \(prefill.read.cache\), which is no answer: let a stage read it",
    ):
        check(answered)


@pytest.mark.parametrize(
    ("stage", "wrong", "message"),
    [
        (
            "decode",
            {"engine_args": {"kv_transfer_config": {"kv_role": "kv_both"}}},
            r"kv_transfer_config: set by the gra",
        ),
        (
            "prefill",
            {"epd": {"instances": {"P": 1, "D": 1}}},
            r"'prefill': epd.instances: its KV cache travels to anoth",
        ),
        (
            "decode",
            {"engine_args": {"pipeline_parallel_size": 2}},
            r"'decode': pipeline_parallel_size = 2: KV caches tr",
        ),
        (
            "decode",
            {"vllm_config": object(), "model": ""},
            r"'decode': vllm_config: its KV connector is set by the graph",
        ),
    ],
)
def test_a_deployment_without_room_for_the_connector_is_rejected(stage: str, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(stages={stage: wrong})


def test_an_edge_with_a_cache_has_a_transport_and_no_stream() -> None:
    check(edges=(EdgeConfig(source="prefill", target="decode", transport="tcp"),))
    with pytest.raises(ConfigError, match=r"stream = True: the KV cache of a prompt is pulled when the prompt is comp"):
        check(edges=(EdgeConfig(source="prefill", target="decode", stream=True),))
    with pytest.raises(ConfigError, match=r"credits = 4 has no effect: the KV cache of a prompt is pulled"):
        check(edges=(EdgeConfig(source="prefill", target="decode", credits=4),))


# -- two engines, not started ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_v2.build(tmp_path_factory.mktemp("checkpoint"))


def make_engines(model: Path, *stage_overrides: str, **more: Any) -> tuple[OmniConfig, dict[str, StageEngine], Any]:
    config = load_config(
        model,
        pipeline=PrefillDecode,
        dtype="float32",
        enforce_eager=True,
        attention_backend="CPU_MLA",
        stage_overrides=stage_overrides,
        **more,
    )
    pipeline = PrefillDecode(str(model), AutoConfig.from_pretrained(model))
    plans = parse_graphs([pipeline.graph]).values()
    specs = {spec.name: spec for spec in pipeline.stages}
    sources = cache_sources(plans, specs)
    specs = with_connectors(plans, specs, sources)
    engines = {
        stage.name: StageEngine(stage, specs[stage.name], cache_source=sources.get(stage.name))
        for stage in config.stages
    }
    for engine in engines.values():
        check_default_params(engine)
    return config, engines, plans


@pytest.fixture(scope="module")
def engines(model: Path) -> dict[str, StageEngine]:
    return make_engines(model)[1]


def test_the_stages_have_the_two_ends_of_a_connector(engines: dict[str, StageEngine]) -> None:
    roles = {name: engine.vllm_config.kv_transfer_config.kv_role for name, engine in engines.items()}
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}
    assert engines["decode"].cache_source == CacheSource("prefill", ("decode",), is_read_once=True)
    check_layouts({"decode": CacheSource("prefill", ("decode",), True)}, lambda name: engines[name].vllm_config)


def test_an_engine_that_only_prefills_is_known_by_its_fields(model: Path) -> None:
    roles: list[str] = []
    for prefill in (PrefillDecode, Prefill):
        graph = Graph("g")
        if prefill is Prefill:
            chain(graph)
        else:
            graph = PrefillDecode(str(model), None).graph
        plans = parse_graphs([graph]).values()
        specs = {"prefill": StageSpec("prefill", "", "text", cache_fields=CACHE), "decode": StageSpec("decode", "", "")}
        made = with_connectors(plans, specs, cache_sources(plans, specs))
        roles.append(made["prefill"].engine_args["kv_transfer_config"]["kv_role"])
    assert roles == ["kv_producer", "kv_both"]


def test_default_parameters_of_a_stage_that_has_those_of_another_are_rejected(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"default_sampling_params: .*'decode': max_tokens: it continues what 'prefil"
    ):
        make_engines(model, "decode.default_sampling_params={max_tokens: 3}")


def test_stages_whose_pages_differ_are_rejected_with_the_difference(engines: dict[str, StageEngine]) -> None:
    sources = {"decode": CacheSource("prefill", ("decode",), is_read_once=True)}
    llama = make_config(num_layers=1, num_heads=2, head_size=32, vocab_size=50, block_size=16)
    configs = {"prefill": engines["prefill"].vllm_config, "decode": llama}
    with pytest.raises(ConfigError, match=r"prefill->decode: .* architecture = 'DeepseekV2ForCausalLM' there, 'Llama"):
        check_layouts(sources, configs.__getitem__)
    others = make_config(num_layers=1, num_heads=2, head_size=32, vocab_size=50, block_size=32)
    with pytest.raises(
        ConfigError, match=r"cannot be used by 'decode': block_size = 16 there, 32 here; serve both fro"
    ):
        check_layouts(sources, {"prefill": llama, "decode": others}.__getitem__)


def test_both_stages_use_the_transport_of_their_edge(model: Path) -> None:
    edge = {"edges": {"prefill->decode": {"transport": "tcp"}}}
    for overrides, transport in (({}, "shm"), (edge, "tcp")):
        config, engines, plans = make_engines(model, overrides=overrides)
        for engine in engines.values():
            options = make_relay_options(engine, lambda name, engines=engines: [engines[name]], plans, config)
            assert (options.transport, options.edges) == (transport, {})
    config, engines, plans = make_engines(model, overrides={"edges": {"prefill->decode": {"transport": "inline"}}})
    with pytest.raises(ConfigError, match=r"prefill->decode: transport = 'inline': a KV cache lies in buffers"):
        make_relay_options(engines["decode"], lambda name: [engines[name]], plans, config)


def test_the_tokens_of_the_reading_stage_meet_the_latency_targets_of_the_request(
    engines: dict[str, StageEngine],
) -> None:
    params = SamplingParams(extra_args={SLO_ARGS: {"ttft_ms": 100.0}})
    config: Any = SimpleNamespace()
    slos = check_params({"prefill": params, "decode": SamplingParams()}, config, engines.values())
    assert {stage: slo.ttft_ms for stage, slo in slos.items()} == {"decode": 100.0}


# -- requests ----------------------------------------------------------------------------------------------------------


async def engine_request(engine: StageEngine, request: StageRequest, given: SamplingParams, *wanted: str) -> Any:
    _, params = await engine.kind.engine_request(engine.config, engine.spec, request, given, frozenset(wanted))
    return params


async def test_a_prompt_that_only_passes_its_cache_has_one_token(engines: dict[str, StageEngine]) -> None:
    given = SamplingParams(
        max_tokens=50, n=2, temperature=1.0, extra_args={KV: {"mine": 1}, SLO_ARGS: {"ttft_ms": 9.0}}
    )
    params = await engine_request(engines["prefill"], StageRequest(None, {"a": 1}), given, "cache")
    assert (params.max_tokens, params.n, params.output_kind) == (1, 1, RequestOutputKind.FINAL_ONLY)
    expected = {KV: {"do_remote_decode": True}, STAGE_ARGS: {"a": 1}, SLO_ARGS: {"ttft_ms": 9.0}}
    assert params.extra_args == expected


async def test_a_stage_that_answers_too_passes_its_cache_at_the_end(engines: dict[str, StageEngine]) -> None:
    params = await engine_request(engines["prefill"], StageRequest(None), SamplingParams(max_tokens=5), "cache", "text")
    assert (params.max_tokens, params.extra_args) == (5, {KV: {"do_remote_decode": True}})


async def test_pages_go_to_the_engine_unless_the_prompt_must_be_computed_there(engines: dict[str, StageEngine]) -> None:
    request = StageRequest(None, cache=ANNOUNCED)
    given = SamplingParams(extra_args={KV: {"mine": 1}})
    assert (await engine_request(engines["decode"], request, given, "text")).extra_args == {KV: ANNOUNCED}
    given = SamplingParams(prompt_logprobs=1, extra_args={KV: {"mine": 1}})
    assert (await engine_request(engines["decode"], request, given, "text")).extra_args is None


async def test_a_request_has_the_parameters_of_the_stage_that_computed_its_prompt(
    engines: dict[str, StageEngine],
) -> None:
    params = {"prefill": SamplingParams(max_tokens=7), "decode": SamplingParams()}
    context: Any = SimpleNamespace(params=params, lora_request=None)
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    rendered, resolved = await engines["decode"].prepare(
        StageRequest(prompt, cache=ANNOUNCED), context, frozenset({"text"})
    )
    assert (rendered, resolved.max_tokens) == (prompt, 7)


def test_only_a_prompt_of_tokens_passes_its_cache() -> None:
    check_prompt("prefill", {"type": "token"})
    with pytest.raises(InvalidRequest, match="stage 'prefill': a prompt of type 'embeds'"):
        check_prompt("prefill", {"type": "embeds"})


def test_parameters_for_a_stage_that_has_those_of_another_are_rejected() -> None:
    source = CacheSource("prefill", ("decode",), is_read_once=True)
    check_given("prefill", None, {"max_tokens": 1})
    check_given("decode", source, {})
    with pytest.raises(InvalidRequest, match=r"'decode': max_tokens: it continues .* give them for 'prefill'"):
        check_given("decode", source, {"max_tokens": 1})


class Hub:
    """Counts what is released."""

    def __init__(self) -> None:
        self.released: list[Payload] = []

    def release_payload(self, payload: Payload, *, for_all: bool) -> None:
        assert for_all
        self.released.append(payload)


def output(**more: Any) -> OmniRequestOutput:
    one = OmniRequestOutput("r", None, [1], None, [], True, **more)
    one.add_fields()
    return one


@pytest.mark.parametrize(("is_read_once", "n", "num_released"), [(True, 1, 1), (False, 1, 0), (True, 2, 0)])
def test_pages_are_released_with_the_first_output_of_their_only_reader(
    is_read_once: bool, n: int, num_released: int
) -> None:
    hub: Any = Hub()
    params = SamplingParams(n=n, temperature=1.0, extra_args={KV: ANNOUNCED})
    source = CacheSource("prefill", ("decode",), is_read_once)
    caches = RequestCaches(source, StageSpec("decode", "", "text"), None, params, hub)
    for _ in range(2):
        caches.note_output(output())
    assert len(hub.released) == num_released


async def test_an_announcement_becomes_the_request_of_the_next_stage() -> None:
    hub: Any = Hub()
    spec = replace(StageSpec("prefill", "", "text"), cache_fields=CACHE)
    announced = output(kv_transfer_params=ANNOUNCED)
    RequestCaches(None, spec, "prompt", SamplingParams(), hub).note_output(announced)
    assert announced.kv_transfer_params is None
    outputs = [StageOutput("r"), StageOutput.of(announced)]
    assert outputs[1].prompt_cache == PromptCache("prompt", ANNOUNCED)

    async def chunks() -> AsyncIterator[Chunk]:
        for one in [*outputs, None]:
            yield Chunk(one)

    whole = Whole()
    for one in outputs:
        whole.push(one)
    assert next(whole.finish()).prompt_cache == PromptCache("prompt", ANNOUNCED)
    passed = [chunk async for chunk in pass_cache(chunks())]
    assert [(chunk.payload, chunk.last) for chunk in passed] == [(StageRequest("prompt", cache=ANNOUNCED), True)]
