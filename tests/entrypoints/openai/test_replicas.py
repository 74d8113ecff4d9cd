"""What servers publish of their replicas, over a real Redis server."""

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.redis_server import run_redis, start_redis
from vllm_omni.engine.running import STOPPING, RunningRequests
from vllm_omni.entrypoints.openai.replicas import Membership, address_of, open_registry
from vllm_omni.errors import ConfigError
from vllm_omni.process.status import StageState, StageStatus


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with run_redis(tmp_path) as url:
        yield url


class Engine:
    def __init__(self, num_requests: int = 0) -> None:
        self.num_requests = num_requests
        self.status = StageStatus()

    def current_status(self) -> StageStatus:
        return self.status


def make_server(url: str | None, name: str) -> tuple[Membership, Any]:
    """A server with two talkers, and its orchestrator."""
    engines = {f"talker/{number}": Engine(number) for number in range(2)}
    orchestrator = SimpleNamespace(engines=engines, nodes={}, requests=RunningRequests())
    registry = open_registry(url)
    return Membership(orchestrator, registry, f"http://{name}:8000", "tiny", 0.01), orchestrator  # type: ignore[arg-type]


def states(membership: Membership) -> dict[str, str]:
    return {f"{one['address'][7:-5]} {one['engine']}": one["state"] for one in membership.report()["replicas"]}


async def until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.01)


async def test_without_a_registry_a_server_reports_its_own_engines() -> None:
    server, orchestrator = make_server(None, "one")
    orchestrator.engines["talker/1"].status = StageStatus(StageState.RESTARTING, "killed", 2)
    async with server.joined():
        report = server.report()
    assert report["registry"] is None
    assert report["replicas"][1] == {
        "server": report["server"],
        "engine": "talker/1",
        "address": "http://one:8000",
        "model": "tiny",
        "state": "restarting",
        "reason": "killed",
        "num_requests": 1,
        "work": 0.0,
        "num_restarts": 2,
    }


async def test_two_servers_see_the_same_replicas_and_what_becomes_of_them(redis_url: str) -> None:
    (one, engines), (two, _) = make_server(redis_url, "one"), make_server(redis_url, "two")
    async with one.joined():
        async with two.joined():
            everyone = dict.fromkeys(
                ("one talker/0", "one talker/1", "two talker/0", "two talker/1"), StageState.RUNNING.value
            )
            await until(lambda: states(one) == everyone == states(two))
            engines.engines["talker/1"].status = StageStatus(StageState.DRAINED, "it gets no new requests")
            await until(lambda: states(two) == everyone | {"one talker/1": "drained"})
            engines.requests.drain()
            await until(lambda: states(two)["one talker/0"] == "drained")
            assert two.report()["replicas"][2]["reason"] == STOPPING
        await until(lambda: len(states(one)) == 2)  # the other has left


async def test_while_the_registry_is_away_a_server_reports_what_it_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, url = start_redis(tmp_path)
    (one, engines), (two, _) = make_server(url, "one"), make_server(url, "two")
    async with one.joined(), two.joined():
        await until(lambda: len(states(one)) == len(states(two)) == 4)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        await until(lambda: one.report()["registry"]["error"] is not None)
        engines.engines["talker/0"].status = StageStatus(StageState.FAILED, "given up")
        assert states(one) == {
            "one talker/0": "failed",
            "one talker/1": "running",
            "two talker/0": "running",
            "two talker/1": "running",
        }
        age_s = one.report()["registry"]["age_s"]
        await until(lambda: one.report()["registry"]["age_s"] > age_s)
        process, _ = start_redis(tmp_path)
        await until(lambda: states(two)["one talker/0"] == "failed")
        assert one.report()["registry"]["error"] is None
    process.kill()
    process.wait(10)
    said = [record.getMessage() for record in caplog.records if "this server continues" in record.getMessage()]
    assert len(said) == 2  # once by each server, however long


async def test_a_server_starts_and_ends_without_its_registry() -> None:
    server, _ = make_server("redis://127.0.0.1:1", "one")
    async with asyncio.timeout(60), server.joined():
        await until(lambda: server.report()["registry"]["error"] is not None)
        assert server.report()["registry"]["age_s"] is None
        assert len(states(server)) == 2


def test_a_wrong_url_is_rejected_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"'redis\.local' is no URL of Redis"):
        open_registry("redis.local")


def test_the_address_is_one_that_other_hosts_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")

    def address(host: str | None, **more: Any) -> str:
        return address_of(Namespace(**{"host": host, "port": 8000, "uds": None, "ssl_certfile": None} | more))

    assert address(None) == address("0.0.0.0") == address("::") == "http://box:8000"
    assert address("10.0.0.1", ssl_certfile="cert.pem") == "https://10.0.0.1:8000"
    assert address("fd00::1") == "http://[fd00::1]:8000"
    assert address(None, uds="/run/omni.sock") == "unix:/run/omni.sock"
