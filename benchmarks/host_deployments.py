"""The servers that ``benchmarks/hosts.py`` compares, and what they are asked.

Baseline: one machine with all stages.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import, also by the servers

import httpx
import psutil

from benchmarks.serve import Server, serve
from tests.hosts.machines import Host, Network, network
from tests.hosts.ray_cluster import VARIABLES, Cluster
from vllm_omni.relay.secret import MIN_BYTES

STAGES = {"thinker": "box-a", "talker": "box-b", "token2wav": "box-c"}
TALKERS = {"thinker": "box-a", "talker/0": "box-b", "token2wav": "box-c", "talker/1": "box-d"}
ONE, HOSTS, RAY = "one machine", "hosts", "Ray"
PORT = 7654
END_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 180.0
ORPHAN_S = 120.0  # on a busy machine a front end starts in more than the default


class Deployment:
    """A front end of this machine, and a host for each engine.

    Args:
        hosts: engine -> its host; "talker/1" is the second replica of a stage.
        flags: more of the front end.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        directory: Path,
        hosts: Mapping[str, str] = STAGES,
        flags: Sequence[str] = (),
    ) -> None:
        self._stack, self._model, self._directory = stack, model, directory
        self._places, self._flags = hosts, flags
        self._token = directory / "token"
        self._token.write_text("s" * MIN_BYTES)
        self._token.chmod(0o600)
        self._net: Network = stack.enter_context(network(directory))
        self.hosts: dict[str, Host] = {engine: self._net.add() for engine in hosts}
        for engine in hosts:
            self.join(engine)
        self.server = self.start_front_end()

    def join(self, engine: str) -> None:
        """Start the program of an engine's host."""
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self._model), "--omni", "--headless"]
        command += [f"--stage={engine}", f"--join={self._net.address}:{PORT}", f"--token-file={self._token}"]
        log = self._directory / f"{engine.replace('/', '-')}.log"
        self.hosts[engine].start(command, log, VLLM_OMNI_ORPHAN_S=str(ORPHAN_S))

    def start_front_end(self) -> Server:
        by_stage: dict[str, list[str]] = {}
        for engine, host in self._places.items():
            by_stage.setdefault(engine.partition("/")[0], []).append(host)
        flags = [f"--stage={stage}.host=[{','.join(hosts)}]" for stage, hosts in by_stage.items()]
        flags += [f"--stage={stage}.replicas={len(hosts)}" for stage, hosts in by_stage.items() if len(hosts) > 1]
        flags += [*self._flags, f"--listen={self._net.address}:{PORT}", f"--token-file={self._token}"]
        self.server = self._stack.enter_context(serve(self._model, "--omni", *flags))
        return self.server

    def kill_front_end(self) -> None:
        self.server.process.kill()
        self.server.process.wait(END_TIMEOUT_S)

    def processes(self, stage: str) -> list[psutil.Process]:
        """Those of a stage's host."""
        return [
            child for one in self.hosts[stage].running() for child in psutil.Process(one.pid).children(recursive=True)
        ]


@contextmanager
def started(kind: str, model: Path, directory: Path, ray: Cluster | None) -> Iterator[Deployment | Server]:
    with ExitStack() as stack:
        if kind == ONE:
            yield stack.enter_context(serve(model, "--omni"))
        elif kind == HOSTS:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="vo", dir=directory))
            yield Deployment(stack, model, Path(place))
        else:
            assert ray is not None
            flags = ["--worker-backend=ray", f"--ray-address={ray.address}", "--stage=talker.host=box-b"]
            yield stack.enter_context(serve(model, "--omni", *flags, **VARIABLES))


def server_of(one: Deployment | Server) -> Server:
    return one.server if isinstance(one, Deployment) else one


def label_of(process: psutil.Process) -> str:
    """The role of one of our processes; empty: a helper of Python's or the system's."""
    command = " ".join(process.cmdline())
    if stage := re.search(r"VLLM::(\w+)::", command):
        return f"engine {stage[1]}"
    if "--headless" in command and "vllm" in command and "mount" not in command:
        return "host program"
    return "fork server" if "forkserver" in command.lower() else ""


def processes_of(one: Deployment | Server) -> dict[str, psutil.Process]:
    server = server_of(one)
    found = {"front end": server.process}
    places = {"": server.process.children(recursive=True)}
    if isinstance(one, Deployment):
        places |= {f" of {stage}'s host": one.processes(stage) for stage in STAGES}
    for place, processes in places.items():
        for process in processes:
            label = label_of(process)
            if label:
                found[label if label.startswith("engine") else label + place] = process
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    first_audio_s: float
    completion_s: float
    text: str
    num_bytes: int  # of sound


def speech_of(number: int, num_tokens: int, num_codes: int) -> dict[str, Any]:
    params = {"talker": {"temperature": 0.0, "max_tokens": num_codes, "ignore_eos": True}, "token2wav": {"seed": 0}}
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "sampling_params_list": params,
        "temperature": 0.0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    started_at, first_audio_s = time.perf_counter(), 0.0
    text, sound = "", b""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.RemoteProtocolError(str(event["error"]))
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    first_audio_s = first_audio_s or time.perf_counter() - started_at
                    sound += base64.b64decode(data)
    if not sound:
        raise httpx.RemoteProtocolError("an answer without sound")
    return Answer(first_audio_s, time.perf_counter() - started_at, text, len(sound))


def ask_at_once(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    return asyncio.run(run())
