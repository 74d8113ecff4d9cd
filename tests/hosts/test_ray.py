"""A real server whose stages, or whose engine's parts, Ray places on two machines (``--worker-backend ray``)."""

import asyncio
import base64
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import machine
from tests.e2e.engines import MARKS, UPSTREAM, greedy, tokens_of, upstream_answers
from tests.e2e.test_epd_transports import PROMPTS, SHAPE
from tests.hosts.deployments import NUM_REQUESTS, SMALL, answer, assert_equal, wait_for
from tests.hosts.ray_cluster import VARIABLES, Cluster, cluster
from tests.processes import paused
from tests.server import END_TIMEOUT_S, Server, ask, serve
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.status import StageState
from vllm_omni.relay.secret import MIN_BYTES
from vllm_omni.testing import llava as llava

pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.long]  # units: tests/deploy/test_cluster.py

FLAGS = ["--max-model-len=1024", "--enforce-eager", "--dtype=float32", "--skip-mm-profiling"]
CLEAN_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    machine.require("ray")
    machine.require("networks")
    with cluster(tmp_path_factory.mktemp("r"), tmp_path_factory.mktemp("h")) as made:
        yield made


def said(server: Server) -> tuple[str, bytes]:
    """Text and sound of an answer."""
    audio = {"voice": "Chelsie", "format": "wav"}
    message = ask(server.client, modalities=["text", "audio"], audio=audio).choices[0].message
    return str(message.content), base64.b64decode(message.audio.data)


def flags_of(cluster: Cluster) -> list[str]:
    return [*FLAGS, "--worker-backend=ray", f"--ray-address={cluster.address}", "--stage=talker.host=box-b"]


def children_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def titles(cluster: Cluster) -> list[str]:
    """Of the processes on box-b."""
    return ["".join(one.cmdline()) for one in cluster.programs()]


def assert_secret(server: Server, cluster: Cluster) -> None:
    """The secret is in no command line, no environment, no log of the server and no file of Ray's."""
    own = Path(f"/proc/{server.process.pid}/fd")
    (file,) = [one for one in own.iterdir() if "vllm-omni-secret" in str(one.readlink())]
    secret = file.read_bytes()
    assert len(secret) >= MIN_BYTES
    programs = cluster.programs()
    assert programs
    for place in [Path(f"/proc/{one.pid}") / name for one in programs for name in ("cmdline", "environ")]:
        assert secret not in place.read_bytes()
    logs = [server.log, *(one for one in cluster.directory.rglob("*") if one.is_file() and not one.is_symlink())]
    assert [one for one in logs if secret in one.read_bytes()] == []


def test_stages_that_ray_places_answer_as_one_machine_and_leave_nothing_after_ctrl_c(
    ray_cluster: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    with serve(checkpoint, tmp_path / "one.log", *FLAGS) as server:
        expected = said(server)
    with serve(checkpoint, tmp_path / "ray.log", *flags_of(ray_cluster), **VARIABLES) as server:
        assert said(server) == expected
        state = ray_cluster.state()
        assert (sorted(state["actors"]), state["groups"]) == (["box-a", "box-b"], ["CREATED"])
        assert_secret(server, ray_cluster)
        with paused(ray_cluster.head_server().pid):  # what runs needs no head
            assert said(server) == expected
        children = children_of(server)
        server.process.send_signal(signal.SIGINT)
        server.process.wait(END_TIMEOUT_S)
        assert not psutil.wait_procs(children, END_TIMEOUT_S)[1]
        ray_cluster.wait_until_clean(CLEAN_WITHIN_S)


def test_instances_that_ray_places_answer_as_one_machine(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    llava_checkpoint = llava.build(tmp_path / "llava", SHAPE)
    expected = tokens_of(upstream_answers(llava_checkpoint, PROMPTS))
    where = ["language.host=[box-a, box-b, box-b]"]
    with OmniLLM(
        llava_checkpoint,
        **UPSTREAM,
        epd="E:1,P:1,D:1",
        stage_overrides=where,
        worker_backend="ray",
        ray_address=ray_cluster.address,
    ) as omni:
        assert tokens_of(omni.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
        group = omni.engine.orchestrator.nodes["language"]
        assert isinstance(group, InstanceGroup)
        assert (group.statistics().num_encoded, group.statistics().num_migrations) == (4, 5)
    ray_cluster.wait_until_clean(CLEAN_WITHIN_S)


def test_an_engine_on_both_nodes_answers_as_one_machine_also_after_the_end_of_a_part(
    ray_cluster: Cluster, checkpoint: Path, expected: list[OmniRequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    spans = ["thinker.tensor_parallel_size=2", "thinker.nodes=2"]
    with OmniLLM(
        checkpoint, **SMALL, stage_overrides=spans, worker_backend="ray", ray_address=ray_cluster.address
    ) as omni:

        async def ask_all() -> list[OmniRequestOutput]:
            return await asyncio.gather(*(answer(omni, number) for number in range(NUM_REQUESTS)))

        def states() -> set[StageState]:
            return {one.state for one in omni.engine.stage_report().values()}

        assert sorted(ray_cluster.state()["actors"]) == ["box-a", "box-b"]
        assert_equal(omni.run(ask_all()), expected)
        assert any(re.search(r"thinker(/node1)?::Worker_TP", title) for title in titles(ray_cluster))
        (program,) = [one for one in ray_cluster.programs() if "vllm_omni.deploy.host_program" in one.cmdline()]
        program.kill()
        wait_for("the engine is lost", lambda: states() != {StageState.RUNNING}, CLEAN_WITHIN_S)
        wait_for("all stages run", lambda: states() == {StageState.RUNNING}, 2 * CLEAN_WITHIN_S)
        assert_equal(omni.run(ask_all()), expected)
    ray_cluster.wait_until_clean(CLEAN_WITHIN_S)


def test_stages_come_back_after_the_end_of_their_actor_or_of_all_and_a_killed_server_leaves_nothing(
    ray_cluster: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    with serve(checkpoint, tmp_path / "log", *flags_of(ray_cluster), **VARIABLES) as server:
        expected = said(server)
        (actor,) = [one for one in ray_cluster.programs() if "HostActor" in "".join(one.cmdline())]
        stages = actor.children(recursive=True)
        assert stages
        actor.kill()
        assert not psutil.wait_procs(stages, END_TIMEOUT_S)[1]  # Ray may give what they had to others
        wait_for("the stage is lost", lambda: server.get("/health").status_code == 503, CLEAN_WITHIN_S)
        wait_for("the stage runs", lambda: server.get("/health").status_code == 200, 2 * CLEAN_WITHIN_S)
        assert said(server) == expected
        (speaker,) = [one for one in children_of(server) if "vllm_omni.deploy.ray" in " ".join(one.cmdline())]
        speaker.kill()  # Ray ends what it had started
        wait_for("the stages are lost", lambda: server.get("/health").status_code == 503, CLEAN_WITHIN_S)
        wait_for("the stages run", lambda: server.get("/health").status_code == 200, 2 * CLEAN_WITHIN_S)
        assert said(server) == expected
        children = children_of(server)
        server.process.kill()
        server.process.wait()
        assert not psutil.wait_procs(children, END_TIMEOUT_S)[1]
        ray_cluster.wait_until_clean(CLEAN_WITHIN_S)
