"""A deployment as its front end sends it to other hosts."""

from pathlib import Path

import pytest

from vllm_omni.config import OmniConfig, StageConfig, load_config
from vllm_omni.config.travel import ELSEWHERE, on_host, pack_config, unpack_config
from vllm_omni.deploy.needs import list_engines
from vllm_omni.errors import ConfigError
from vllm_omni.testing import qwen2_5_omni as tiny

SPANS = ["talker.tensor_parallel_size=2", "talker.nodes=2", "talker.host=[box-a, box-b]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


def load(model: Path, *stages: str, **more: object) -> OmniConfig:
    return load_config(model, stage_overrides=stages, **more)


def test_a_deployment_arrives_as_it_was_sent_with_the_hosts_own_checkpoint(model: Path) -> None:
    overrides = {"edges": {"thinker->talker": {"transport": "tcp", "credits": 8}}, "voices": {"onyx": "Ethan"}}
    sent = load(model, "talker.host=box-a", "thinker.max_num_seqs=3", overrides=overrides, dtype="float32")
    arrived = unpack_config(pack_config(sent), "/elsewhere/model", None)
    assert arrived == unpack_config(pack_config(arrived), "/elsewhere/model", None)
    assert {stage.model for stage in arrived.stages} == {"/elsewhere/model"}
    for ours, theirs in zip(sent.stages, arrived.stages, strict=True):
        assert (ours.name, ours.engine_args, ours.host) == (theirs.name, theirs.engine_args, theirs.host)
        assert ours.default_sampling_params == theirs.default_sampling_params
    assert (sent.edges, dict(sent.voices), sent.model_type) == (arrived.edges, dict(arrived.voices), arrived.model_type)


def test_a_stage_with_a_checkpoint_of_its_own_keeps_its_path(model: Path) -> None:
    sent = load(model, "talker.model=/models/talker")
    arrived = unpack_config(pack_config(sent), "/elsewhere/model", None)
    assert [stage.model for stage in arrived.stages] == ["/elsewhere/model", "/models/talker", "/elsewhere/model"]


def test_an_object_of_the_process_does_not_travel(model: Path) -> None:
    config = load(model, overrides={"talker": {"default_sampling_params": {"extra_args": {"key": object()}}}})
    with pytest.raises(ConfigError, match="stage 'talker': default_sampling_params cannot travel to other hosts"):
        pack_config(config)


def test_a_host_with_another_pipeline_is_rejected(model: Path) -> None:
    class Other:
        pass

    with pytest.raises(ConfigError, match=r"--pipeline: the front end serves 'qwen2_5_omni', not 'Other'"):
        unpack_config(pack_config(load(model)), str(model), Other)


def test_on_a_host_its_own_engines_run_here_and_all_others_elsewhere(model: Path) -> None:
    config = load(model, "talker.host=[box-a, box-b]", "talker.replicas=2", "token2wav.host=box-b")
    there = on_host(config, ["talker/1", "token2wav"])
    assert [stage.host for stage in there.stages] == [ELSEWHERE, [ELSEWHERE, None], None]
    there = on_host(config, ["token2wav"])
    assert [stage.host for stage in there.stages] == [ELSEWHERE, ELSEWHERE, None]


@pytest.mark.parametrize(
    "override", ["max_replicas=2", "replicas=2", "nodes=2", "data_parallel_size=2", "epd={instances: {E: 1, PD: 1}}"]
)
def test_a_host_may_serve_a_deployment_with_a_stage_that_can_only_be_beside_its_front_end(
    model: Path, override: str
) -> None:
    arrived = unpack_config(pack_config(load(model, "talker.host=box-a", f"thinker.{override}")), str(model), None)
    there = on_host(arrived, ["talker"])
    assert [stage.host for stage in there.stages] == [ELSEWHERE, None, ELSEWHERE]
    assert [engine.name for engine in list_engines(there)] == ["talker"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["talker.host='a b'"], "must be letters, digits"),
        (["talker.host=[box-a]", "talker.replicas=2"], "give one name, or 2, one for each replica"),
        (["talker.host=[box-a, box-b]"], "give one name, or 1, one for each replica"),
        (["talker.host=[box-a, box-b]", "talker.max_replicas=3"], "or 3, one for each replica that may start"),
        (
            ["thinker.host=[box-a]", "thinker.epd.instances=E:1,PD:1"],
            "give one name, or 2, one for each instance: thinker/E0, thinker/PD0",
        ),
        (
            ["thinker.host=box-a", "thinker.epd.instances=E:1,PD:1", "thinker.kv_pool.media_bytes=1000000"],
            "cannot be combined with kv_pool.media_bytes",
        ),
        (
            ["thinker.host=box-a", "thinker.epd.instances=E:1,PD:1", "thinker.data_parallel_size=2"],
            "an engine is on one host",
        ),
        (["talker.host=box-a", "talker.data_parallel_size=2"], "an engine is on one host"),
        (["talker.host=box-a", "talker.nodes=2"], "host = 'box-a': give 2 different names, one for each host"),
        ([*SPANS, "talker.host=[null, box-b]"], "give 2 different names, one for each host, and start .*unless Ray"),
        ([*SPANS, "talker.host=[box-a, box-a]"], "give 2 different names, one for each host"),
        ([*SPANS, "talker.host=[box-a, box-b, box-c]"], "give 2 different names, one for each host"),
        ([*SPANS, "talker.tensor_parallel_size=3"], "nodes = 2: cannot share tensor_parallel_size = 3 evenly"),
        (
            [*SPANS, "token2wav.nodes=2", "token2wav.host=[box-a, box-b]"],
            "cannot share tensor_parallel_size = 1 evenly",
        ),
        ([*SPANS, "talker.replicas=2"], "nodes = 2: cannot be combined with replicas"),
        ([*SPANS, "talker.kv_pool.memory_bytes=1000000"], "nodes = 2: cannot be combined with .* kv_pool"),
        ([*SPANS, "talker.distributed_executor_backend=mp"], "nodes = 2: vLLM's executor for several hosts runs it"),
        ([*SPANS, "talker.device_ids=[0, 1]"], "nodes = 2: each host chooses its devices: leave device_ids out"),
    ],
    ids=[
        "name",
        "too few",
        "too many",
        "too few later",
        "too few instances",
        "media of instances",
        "ranks of instances",
        "data parallel",
        "one name for two hosts",
        "the front end's host",
        "one host twice",
        "too many for nodes",
        "uneven ranks",
        "no ranks",
        "replicas on nodes",
        "pool on nodes",
        "executor on nodes",
        "devices on nodes",
    ],
)
def test_a_host_that_a_stage_cannot_have_is_rejected(model: Path, stages: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(model, *stages)


def test_an_engine_that_spans_hosts_has_a_part_on_each(model: Path) -> None:
    config = load(model, *SPANS)
    stage = config.stage("talker")
    assert (stage.engine_names, stage.hosts) == (["talker"], ["box-a"])
    assert (stage.part_names, stage.part_hosts) == (["talker", "talker/node1"], ["box-a", "box-b"])
    for part in stage.part_names:
        there = on_host(unpack_config(pack_config(config), str(model), None), [part]).stage("talker")
        assert (there.nodes, there.host) == (2, None)
    assert on_host(config, ["thinker"]).stage("talker").nodes == 1


def test_a_replica_has_its_own_host_or_the_front_ends(model: Path) -> None:
    stage = load(model, "talker.host=[null, box-b]", "talker.replicas=2").stage("talker")
    assert (stage.host_of(0), stage.host_of(1), stage.has_other_host) == (None, "box-b", True)


def test_a_replica_that_may_start_later_has_a_host_as_well(model: Path) -> None:
    config = load(model, "talker.host=[null, box-b, box-c]", "talker.replicas=2", "talker.max_replicas=3")
    assert [config.stage("talker").host_of(number) for number in range(3)] == [None, "box-b", "box-c"]
    there = on_host(unpack_config(pack_config(config), str(model), None), ["talker/2"]).stage("talker")
    assert [there.host_of(number) is None for number in range(3)] == [False, False, True]
    assert load(model, "talker.host=[null, box-b]", "talker.max_replicas=2").stage("talker").has_other_host


def test_an_instance_has_its_own_host_or_the_front_ends(model: Path) -> None:
    mix = "thinker.epd.instances=E:1,P:1,D:2"
    config = load(model, "thinker.host=[box-a, null, box-b, box-b]", mix)
    stage = config.stage("thinker")
    assert stage.engine_names == ["thinker/E0", "thinker/P0", "thinker/D0", "thinker/D1"]
    assert (stage.hosts, stage.has_other_host) == (["box-a", None, "box-b", "box-b"], True)
    assert [one.name for one in list_engines(config)] == ["thinker/P0", "talker", "token2wav"]
    arrived = unpack_config(pack_config(config), str(model), None)
    assert [one.name for one in list_engines(on_host(arrived, ["thinker/D0", "thinker/D1"]))] == stage.engine_names[2:]
    assert load(model, "thinker.host=box-a", mix).stage("thinker").hosts == ["box-a"] * 4


def test_an_engine_of_its_own_for_pictures_may_have_another_host() -> None:
    stage = StageConfig(stage_id=0, name="language", model="model", unified=False, host=[None, "box-a"])
    assert (stage.engine_names, stage.hosts) == (["language/EPD0", "language/G0"], [None, "box-a"])
