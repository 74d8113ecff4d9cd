"""The process of a front end: it serves, is restarted, and ends; the engines are generators of the test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.entrypoints.front_ends.link_ends import Engines
from vllm_omni.deploy.needs import place_here
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.front_ends.host import Blueprint
from vllm_omni.entrypoints.front_ends.metrics import SharedMetrics
from vllm_omni.entrypoints.front_ends.process import NOT_ACCEPTING, FrontEnd
from vllm_omni.errors import StageFailed
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.supervisor import Supervisor, in_thread
from vllm_omni.process.tether import ServerTether

STAGES = ("thinker", "talker", "token2wav")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "modalities": ["text"], "max_tokens": 9}


class Running:
    """A front end over the test's engines, with its supervisor."""

    def __init__(self, checkpoint: Path, directory: RunDirectory, *flags: str) -> None:
        parsed = parse_serve_args([str(checkpoint), "--dtype=float32", "--served-model-name=tiny", *flags])
        self.engines = Engines(num_outputs=4)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.loads = [NOT_ACCEPTING]
        self.directory = directory
        metrics = SharedMetrics(directory.path).directory
        lens = dict.fromkeys(STAGES, 512)
        blueprint = Blueprint(parsed.args, place_here(parsed.load_config()), lens, ("generate",), metrics)
        tether = ServerTether(directory.path, "front_end/0", is_of_engine=False)
        args = 0, blueprint, self.listener, self.loads, self.engines, tether, lambda: None
        self.front_end = FrontEnd(*args)

    async def start(self) -> None:
        with self.directory.inherited():
            await asyncio.wrap_future(in_thread(self.front_end.start))

    async def wait_for(self, is_true: Any) -> None:
        async with asyncio.timeout(60):
            while not is_true():  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # of another process


@asynccontextmanager
async def made(checkpoint: Path, *flags: str) -> AsyncIterator[Running]:
    directory = RunDirectory()
    running = Running(checkpoint, directory, *flags)
    try:
        yield running
    finally:
        await running.front_end.aclose()
        await asyncio.to_thread(running.front_end.end)
        await running.front_end.wait_until_ended()
        running.listener.close()
        directory.remove()


async def test_it_serves_is_restarted_when_it_dies_and_ends_when_it_is_told(tiny_checkpoint: Path) -> None:
    async with made(tiny_checkpoint) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        front_end, engines = running.front_end, running.engines
        await running.start()
        answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"] == "<0><1><2><3>"
        ((prompt, params, arguments),) = engines.requests
        assert prompt["prompt_token_ids"] and params["thinker"].max_tokens == 9
        assert list(arguments["modalities"]) == ["text"]
        # What concerns the server as a whole is answered by the engines.
        assert (await client.get("/health")).status_code == 207
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

        supervisor = Supervisor(front_end, running.directory)
        try:
            engines.num_outputs = 10**9
            reading = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
            await running.wait_for(lambda: len(engines.requests) == 2)
            psutil.Process(front_end.pid).kill()
            with pytest.raises(httpx.TransportError):
                await reading
            await running.wait_for(lambda: len(engines.released) == 2)
            await running.wait_for(lambda: front_end.current_status().num_restarts == 1 and not front_end.has_died)
            await running.wait_for(lambda: front_end.current_status().state.value == "running")
        finally:
            supervisor.stop()
            await asyncio.to_thread(supervisor.join)
        engines.num_outputs = 4
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        process = psutil.Process(front_end.pid)
        front_end.stop()
        await asyncio.wait_for(front_end.wait_until_ended(), 60)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_one_that_is_stopped_is_killed_and_restarted(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_STAGE_STUCK_S", "3")
    async with made(tiny_checkpoint) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        front_end = running.front_end
        await running.start()
        supervisor = Supervisor(front_end, running.directory)
        try:
            stopped = psutil.Process(front_end.pid)
            stopped.suspend()
            await running.wait_for(lambda: front_end.current_status().state.value == "restarting")
            assert front_end.current_status().reason == "its process answered nothing for 3 s"
            await running.wait_for(lambda: front_end.current_status().state.value == "running")
        finally:
            supervisor.stop()
            await asyncio.to_thread(supervisor.join)
        assert front_end.pid != stopped.pid
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_one_that_cannot_start_says_why(tiny_checkpoint: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("no key")
    async with made(tiny_checkpoint, f"--ssl-keyfile={key}", f"--ssl-certfile={key}") as running:
        with pytest.raises(StageFailed, match=r"front_end/0.*did not start: .*(SSL|PEM)"):
            await running.start()
