"""How a stage publishes, by the edges of its graph, where its readers run and the deployment; without engines."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.engine import relay_options
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.relay_options import make_relay_options, place
from vllm_omni.errors import ConfigError
from vllm_omni.flow import ENTRY, CallInfo, Chunk, Field, Graph, Role, interface, parse_graphs
from vllm_omni.model_executor.pipeline import find_pipeline_cls
from vllm_omni.relay.hub import EdgeOptions, RelayOptions
from vllm_omni.relay.select import Placement
from vllm_omni.testing import qwen2_5_omni as tiny

STREAM = Field("text", streamed=True)
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def slabs_of_the_default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other tests are smaller."""
    monkeypatch.delenv("VLLM_OMNI_RELAY_BYTES", raising=False)


def make_engine(device_type: str = "cpu", executor: str = UNIPROC, **more: Any) -> Any:
    parallel = SimpleNamespace(local_world_size=1, tensor_parallel_size=2, distributed_executor_backend=executor)
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device_type), parallel_config=parallel)
    host = more.pop("host", None)
    config = SimpleNamespace(host_of=lambda: host)
    fixed = {"vllm_config": vllm_config, "kind": ENGINE_KINDS["ar"], "cache_source": None, "config": config}
    return SimpleNamespace(**fixed | more)


def options_of(config: OmniConfig, stage: str, instance: object = None, graph: Graph | None = None) -> RelayOptions:
    pipeline = find_pipeline_cls(config.model_type)(config.model, AutoConfig.from_pretrained(config.model))
    engines: dict[str, Any] = {}
    for spec in pipeline.stages:
        stage_config = config.stage(spec.name)
        kind = ENGINE_KINDS[stage_config.engine_type]
        engines[spec.name] = make_engine(name=spec.name, config=stage_config, spec=spec, instance=instance, kind=kind)
    plans = list(parse_graphs([graph or pipeline.graph]).values())
    return make_relay_options(engines[stage], lambda name: [engines[name]], plans, config)


def test_a_stage_publishes_for_each_rank_of_its_reader_or_for_the_user(model: Path) -> None:
    config = load_config(model)
    thinker = options_of(config, "thinker")
    assert thinker.edges == {"talker": EdgeOptions("shm", num_ranks=2, stream=True)}
    assert options_of(config, "talker") == RelayOptions()  # it publishes token ids alone
    assert options_of(config, "token2wav") == RelayOptions("shm")


def test_what_a_replica_may_have_to_read_again_stays(model: Path) -> None:
    replicas = ["talker.replicas=2", "thinker.replicas=2"]
    config = load_config(model, stage_overrides=replicas)
    assert not options_of(config, "thinker", SimpleNamespace(kind=None)).edges["talker"].stays
    edges = {"edges": {"thinker->talker": {"stream": False}}}
    config = load_config(model, overrides=edges, stage_overrides=replicas)
    edge = options_of(config, "thinker").edges["talker"]
    assert (edge.stream, edge.stays) == (False, True)
    assert not options_of(load_config(model, overrides=edges), "thinker").edges["talker"].stays


def test_what_each_iteration_of_a_loop_reads_again_stays(model: Path) -> None:
    class Thinker(Role):
        generate = interface([["prompt"]], {"text": STREAM, "rows": STREAM})

    class Talker(Role):
        generate = interface([["rows"], ["rows", "again"]], {"codes": STREAM})

    graph = Graph("loop")
    rows = graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("prompt")).rows
    talker = graph.role(Talker, "talker")
    codes = talker.generate(rows=rows).codes
    talker.generate(again=codes)
    graph.output(codes=codes)
    edge = options_of(load_config(model), "thinker", graph=graph).edges["talker"]
    assert (edge.stays, edge.stream) == (True, False)


def test_what_another_graph_reads_stays_and_is_not_streamed(model: Path) -> None:
    class Thinker(Role):
        generate = interface([["prompt"]], {"rows": STREAM})

    class Talker(Role):
        generate = interface([["rows"]], {"codes": STREAM})

    async def first(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        yield Chunk(await anext(chunks), last=True)

    thinking, talking, graph = Graph("thinking"), Graph("talking"), Graph("outer")
    thinking.output(rows=thinking.role(Thinker, "thinker").generate(prompt=thinking.placeholder("prompt")).rows)
    thinking.graph_call("think", ["rows"])
    talking.output(codes=talking.role(Talker, "talker").generate(rows=talking.placeholder("rows")).codes)
    talking.graph_call("talk", ["codes"])
    prompt = graph.placeholder("prompt")
    inner = graph.graph_ref(thinking).think(prompt=prompt)
    outer = graph.role(Thinker, "thinker").generate(prompt=prompt)
    codes = graph.graph_ref(talking).talk(rows=inner.rows.via(first))
    again = graph.graph_ref(talking, "again").talk(rows=outer.rows.via(first))
    graph.output(codes=codes.codes, again=again.codes)
    edges = options_of(load_config(model), "thinker", graph=graph).edges
    assert edges[ENTRY] == EdgeOptions("inline", stays=True)
    assert edges["again"] == EdgeOptions("shm", stays=True)
    assert not edges["talker"].stream
    config = load_config(model, overrides={"edges": {"thinker->talker": {"transport": "tcp"}}})
    with pytest.raises(ConfigError, match=r"edge thinker->talker: transport = 'tcp': .* leads from one graph into ano"):
        options_of(config, "thinker", graph=graph)


def test_an_edge_and_the_instances_of_its_source_have_a_transport_each(model: Path) -> None:
    edges = {"thinker->talker": {"transport": "tcp", "credits": 8}}
    config = load_config(model, overrides={"edges": edges}, epd={"instances": {"P": 1, "D": 1}, "transport": "shm"})
    thinker = options_of(config, "thinker", instance=SimpleNamespace(kind="P"))
    assert thinker.transport == "shm"
    assert thinker.edges == {"talker": EdgeOptions("tcp", num_ranks=2, stream=True, credits=8)}


def test_tensors_between_hosts_travel_by_tcp_with_the_deployments_secret(model: Path, tmp_path: Path) -> None:
    hosts = ["talker.host=box-a", "token2wav.host=box-b"]
    token = tmp_path / "token"
    config = load_config(model, stage_overrides=hosts, listen="127.0.0.2:7654", token_file=token)
    thinker = options_of(config, "thinker")
    assert thinker.edges == {"talker": EdgeOptions("tcp", num_ranks=2, stream=True)}
    assert (thinker.host, thinker.secret_file) == ("127.0.0.2", str(token))
    assert options_of(config, "token2wav").transport == "tcp"  # sound for the user


def test_tensors_travel_by_tcp_to_an_engine_that_spans_the_host_of_its_source_and_another(model: Path) -> None:
    spans = ["talker.tensor_parallel_size=2", "talker.nodes=2", "talker.host=[box-a, box-b]"]
    config = load_config(
        model, stage_overrides=["thinker.host=box-a", *spans], listen="127.0.0.2:7654", token_file="token"
    )
    assert options_of(config, "thinker").edges["talker"].transport == "tcp"


def test_tensors_travel_by_tcp_to_a_stage_that_may_start_replicas_on_another_host(model: Path) -> None:
    more = {"listen": "127.0.0.2:7654", "token_file": "token"}
    config = load_config(model, stage_overrides=["talker.host=[null, box-b]", "talker.max_replicas=2"], **more)
    assert options_of(config, "thinker").edges["talker"].transport == "tcp"
    config = load_config(
        model, stage_overrides=["talker.host=[null, null]", "talker.max_replicas=2", "token2wav.host=box-b"], **more
    )
    assert options_of(config, "thinker").edges["talker"].transport == "shm"


@pytest.mark.parametrize(
    ("hosts", "transport"),
    [("[null, null, null]", "shm"), ("[box-a, null, null]", "tcp"), ("[null, null, box-a]", "tcp"), ("box-a", "tcp")],
)
def test_caches_of_instances_travel_by_tcp_unless_all_are_beside_the_front_end(
    model: Path, hosts: str, transport: str
) -> None:
    more = {"listen": "127.0.0.2:7654", "token_file": "token", "epd": "E:1,P:1,D:1"}
    config = load_config(model, stage_overrides=[f"thinker.host={hosts}", "talker.host=box-b"], **more)
    assert options_of(config, "thinker", SimpleNamespace(kind="P")).transport == transport


def test_instances_on_other_hosts_reject_what_shares_memory(model: Path) -> None:
    config = load_config(
        model, stage_overrides=["thinker.host=box-a"], epd={"instances": "E:1,PD:1", "transport": "shm"}
    )
    with pytest.raises(ConfigError, match=r"thinker->instances and front end: transport = 'shm' .*on different hosts"):
        options_of(config, "thinker", SimpleNamespace(kind="E"))


def test_the_relays_of_a_front_end_may_listen_elsewhere_than_hosts_join(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_RELAY_HOST", "127.0.0.3")
    config = load_config(model, stage_overrides=["talker.host=box-a"], listen="127.0.0.2:7654", token_file="token")
    assert options_of(config, "thinker").host == "127.0.0.3"


def test_a_pool_of_hosts_is_read_where_hosts_join(model: Path) -> None:
    pool = {"memory_bytes": 1 << 20, "redis": "redis://10.0.0.9:6379"}
    with pytest.raises(ConfigError, match=r"VLLM_OMNI_RELAY_HOST, which is '127.0.0.1': set it .* by --listen"):
        options_of(load_config(model, kv_pool=pool), "thinker")
    elsewhere = {"stage_overrides": ["thinker.host=box-a"], "listen": "127.0.0.1:7654", "token_file": "token"}
    options_of(load_config(model, kv_pool=pool, **elsewhere), "thinker")  # the host's own address is not known here


@pytest.mark.parametrize("transport", ["shm", "local"])
def test_an_edge_between_hosts_rejects_what_shares_memory(model: Path, transport: str) -> None:
    edges = {"edges": {"thinker->talker": {"transport": transport}}}
    config = load_config(model, overrides=edges, stage_overrides=["talker.host=box-a"])
    with pytest.raises(ConfigError, match=r"on different hosts|different processes"):
        options_of(config, "thinker")


@pytest.mark.parametrize(("transport", "reason"), [("local", "different processes"), ("cuda_ipc", "cpu and cpu")])
def test_a_transport_that_cannot_work_where_the_stages_run_names_the_edge(
    model: Path, transport: str, reason: str
) -> None:
    config = load_config(model, overrides={"edges": {"thinker->talker": {"transport": transport}}})
    with pytest.raises(
        ConfigError, match=f"edge thinker->talker: transport = '{transport}' cannot work here: .*{reason}"
    ):
        options_of(config, "thinker")


CPU, OTHER_CPU = make_engine(), make_engine()
RANKS = make_engine(executor="mp")
GPUS = {name: make_engine("cuda", device=name) for name in ("cuda:0", "cuda:1")}
SAME_GPU = make_engine("cuda", device="cuda:0")
PAINTER = make_engine("cuda", device="cuda:0", kind=ENGINE_KINDS["diffusion"])
SPREAD = make_engine("cuda", device=["cuda:0", "cuda:1"])
BOX_A, ALSO_A, BOX_B = (make_engine(host=host) for host in ("box-a", "box-a", "box-b"))


@pytest.mark.parametrize(
    ("source", "targets", "placement"),
    [
        (CPU, [OTHER_CPU], Placement()),
        (CPU, [CPU], Placement(same_process=True)),
        (CPU, [CPU, OTHER_CPU], Placement()),  # replicas
        (RANKS, [RANKS], Placement()),
        (GPUS["cuda:0"], [SAME_GPU], Placement(devices=("cuda", "cuda"), same_gpu=True)),
        (GPUS["cuda:0"], [GPUS["cuda:1"]], Placement(devices=("cuda", "cuda"))),
        (GPUS["cuda:0"], [SPREAD], Placement(devices=("cuda", "cuda"))),
        (GPUS["cuda:0"], [CPU], Placement(devices=("cuda", "cpu"))),
        (PAINTER, [SAME_GPU], Placement(devices=("cpu", "cuda"))),  # its pictures are on the host
        (CPU, [BOX_A], Placement(same_host=False)),
        (BOX_A, [ALSO_A], Placement()),
        (BOX_A, [ALSO_A, BOX_B], Placement(same_host=False)),
    ],
    ids=[
        *("apart", "itself", "a replica of itself", "ranks", "one GPU", "two GPUs", "ranks on two GPUs", "GPU and CPU"),
        *("pictures", "two hosts", "another host", "readers on two hosts"),
    ],
)
def test_an_edge_is_placed_by_the_processes_and_devices_of_its_engines(
    source: Any, targets: Sequence[Any], placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {id(one.vllm_config): getattr(one, "device", "cpu") for one in (source, *targets)}

    def devices_of(vllm_config: Any) -> list[str]:
        found = devices[id(vllm_config)]
        return found if isinstance(found, list) else [found]

    monkeypatch.setattr(relay_options, "devices_of", devices_of)
    assert place(source, targets) == placement
    # Others of the stage may start anywhere.
    assert place(source, targets, grows=True) == Placement(devices=placement.devices, same_host=placement.same_host)
