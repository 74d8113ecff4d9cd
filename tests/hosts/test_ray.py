"""A real server whose stages, or whose engine's parts, Ray places on two machines (``--worker-backend ray``)."""

import base64
import io
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import soundfile

from tests import machine
from tests.e2e.engines import MARKS, UPSTREAM, greedy, tokens_of, upstream_answers
from tests.e2e.test_epd_transports import PROMPTS, SHAPE
from tests.hosts.deployments import NOTICED_S, wait_for
from tests.hosts.ray_cluster import VARIABLES, Cluster, cluster
from tests.processes import paused
from tests.server import END_TIMEOUT_S, Server, ask, serve
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.relay.secret import MIN_BYTES
from vllm_omni.testing import llava as llava

pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.long]  # units: tests/deploy/test_cluster.py

FLAGS = ["--max-model-len=1024", "--enforce-eager", "--dtype=float32", "--skip-mm-profiling"]
CLEAN_WITHIN_S = 60.0
OF_16_BITS = 2.0**-15


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    machine.require("ray")
    machine.require("networks")
    with cluster(tmp_path_factory.mktemp("r"), tmp_path_factory.mktemp("h")) as made:
        yield made


class Said(NamedTuple):
    """Text and sound of an answer."""

    text: str
    sound: bytes  # of a file

    def check(self, expected: "Said") -> None:
        """Check that it is the same but for the order in which ranks sum."""
        assert self.text == expected.text
        ours, theirs = (soundfile.read(io.BytesIO(one.sound))[0] for one in (self, expected))
        assert len(ours) == len(theirs) > 0
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max() + OF_16_BITS


def said(server: Server) -> Said:
    audio = {"voice": "Chelsie", "format": "wav"}
    message = ask(server.client, modalities=["text", "audio"], audio=audio).choices[0].message
    return Said(str(message.content), base64.b64decode(message.audio.data))


@pytest.fixture(scope="module")
def said_by_one_machine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Said:
    with serve(checkpoint, tmp_path_factory.mktemp("one") / "log", *FLAGS) as server:
        return said(server)


def flags_of(cluster: Cluster, *stages: str) -> list[str]:
    where = ["--worker-backend=ray", f"--ray-address={cluster.address}"]
    return [*FLAGS, *where, *(f"--stage={stage}" for stage in stages)]


def wait_until_restarted(what: str, server: Server) -> None:
    wait_for(f"{what} is lost", lambda: server.get("/health").status_code == 503, CLEAN_WITHIN_S)
    wait_for(f"{what} runs", lambda: server.get("/health").status_code == 200, 2 * CLEAN_WITHIN_S)


def children_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def titles(cluster: Cluster) -> list[str]:
    """Of the processes on box-b."""
    return ["".join(one.cmdline()) for one in cluster.programs()]


def wait_for_title(pattern: str, cluster: Cluster) -> None:
    deadline = time.monotonic() + NOTICED_S
    while not re.search(pattern, found := " ".join(titles(cluster))):
        assert time.monotonic() < deadline, f"none is {pattern}: {found}"
        time.sleep(0.1)


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


def test_stages_that_ray_places_answer_as_one_machine_and_come_back_and_leave_nothing_after_ctrl_c(
    ray_cluster: Cluster, checkpoint: Path, said_by_one_machine: Said, tmp_path: Path
) -> None:
    expected = said_by_one_machine
    with serve(checkpoint, tmp_path / "log", *flags_of(ray_cluster, "talker.host=box-b"), **VARIABLES) as server:
        assert said(server) == expected
        state = ray_cluster.state()
        assert (sorted(state["actors"]), state["groups"]) == (["box-a", "box-b"], ["CREATED"])
        assert_secret(server, ray_cluster)
        with paused(ray_cluster.head_server().pid):  # what runs needs no head
            assert said(server) == expected
        (actor,) = [one for one in ray_cluster.programs() if "HostActor" in "".join(one.cmdline())]
        stages = actor.children(recursive=True)
        assert stages
        actor.kill()
        assert not psutil.wait_procs(stages, END_TIMEOUT_S)[1]  # Ray may give what they had to others
        wait_until_restarted("the stage", server)
        assert said(server) == expected
        (speaker,) = [one for one in children_of(server) if "vllm_omni.deploy.ray" in " ".join(one.cmdline())]
        speaker.kill()  # Ray ends what it had started
        wait_until_restarted("each stage", server)
        assert said(server) == expected
        children = children_of(server)
        server.process.send_signal(signal.SIGINT)
        server.process.wait(END_TIMEOUT_S)
        assert not psutil.wait_procs(children, END_TIMEOUT_S)[1]
        ray_cluster.wait_until_clean(CLEAN_WITHIN_S)
        assert ray_cluster.directories() == [], "of killed actors, too: the next host has removed them"


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


def test_an_engine_on_both_nodes_answers_as_one_machine_also_after_the_end_of_a_part_and_a_killed_server_leaves_nothing(
    ray_cluster: Cluster, checkpoint: Path, said_by_one_machine: Said, tmp_path: Path
) -> None:
    """Several requests at once, over nodes that are no cluster of Ray's: tests/hosts/test_nodes.py."""
    spans = ("thinker.tensor_parallel_size=2", "thinker.nodes=2")
    with serve(checkpoint, tmp_path / "log", *flags_of(ray_cluster, *spans), **VARIABLES) as server:
        assert sorted(ray_cluster.state()["actors"]) == ["box-a", "box-b"]
        said(server).check(said_by_one_machine)
        wait_for_title(r"thinker(/node1)?::Worker_TP", ray_cluster)
        (program,) = [one for one in ray_cluster.programs() if "vllm_omni.deploy.host_program" in one.cmdline()]
        program.kill()
        wait_until_restarted("the engine", server)
        said(server).check(said_by_one_machine)
        children = children_of(server)
        server.process.kill()
        server.process.wait()
        assert not psutil.wait_procs(children, END_TIMEOUT_S)[1]
        ray_cluster.wait_until_clean(CLEAN_WITHIN_S)
