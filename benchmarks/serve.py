"""The server itself: what a streamed chunk costs its front end, requests per second, start and memory.

    python -m benchmarks.serve [--runs 3] [--short]

Baseline: ``vllm serve MODEL`` without ``--omni``, the stock server of the same language model with the same flags.

* ``chunk``: CPU time of the front end's process for each chunk of streamed chats, at 1 and at 8 clients.
* ``rate``: whole chats of 8 tokens per second, from 1 to 64 clients.
* ``start``: from the command to the first ``/health`` that says yes: one stage of each server, and the three stages of
  Qwen2.5-Omni with stages forked, as by default on a CPU, and spawned; for these also when the first text was answered.
* ``front_ends``: chats per second of 16 clients, with 1 to 3 front ends (``--api-server-count``), of requests whose
  work is in the front end: a long prompt or a picture to read, and one token to sample. Baseline: one front end.
* ``memory``: of all processes of these two, after an answer in text and speech: pages that several share count once.

Models: a language model and Qwen2.5-Omni of random parameters, in the real layout, float32, without compilation. The
servers take turns; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import, also by the servers
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import numpy as np
import psutil
from PIL import Image

from vllm_omni.testing import llava, qwen2_5_omni

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
NUM_AT_FRONT_ENDS = 16  # clients
STREAMING = (1, 8)
START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 60.0
FLAGS = ("--dtype=float32", "--enforce-eager", "--max-model-len=512", "--skip-mm-profiling")
SPOKEN = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "wav"},
    "sampling_params_list": {"talker": {"max_tokens": 12}},
}


class Server(NamedTuple):
    url: str
    process: psutil.Process
    ready_s: float

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time of the front end, by the clock of ``clock_getcpuclockid``: /proc counts in steps of 10 ms."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def memory(self) -> int:
        """Bytes, each page divided by the number of processes that share it."""
        return sum(one.memory_full_info().pss for one in self.processes())


@contextmanager
def serve(model: Path, *flags: str, **variables: str) -> Iterator[Server]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *FLAGS, *flags]
    command += ["--host=127.0.0.1", f"--port={port}", "--served-model-name=tiny", "--disable-uvicorn-access-log"]
    started_at = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, running, started_at + START_TIMEOUT_S)
            yield Server(url, psutil.Process(running.pid), time.perf_counter() - started_at)
        except Exception:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            running.terminate()
            running.wait(END_TIMEOUT_S)


def _wait_until_healthy(url: str, running: subprocess.Popen[bytes], deadline: float) -> None:
    with httpx.Client(timeout=5) as client:
        while time.perf_counter() < deadline:
            if running.poll() is not None:
                raise RuntimeError(f"the server ended while it started: {running.returncode}")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
    raise TimeoutError(f"no server within {START_TIMEOUT_S:g} s")


def chat(num_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    fixed = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    return {"model": "tiny", "messages": messages, **fixed, **more}


async def stream(client: httpx.AsyncClient, num_tokens: int) -> int:
    """Read one streamed chat; returns its number of chunks."""
    body, number = chat(num_tokens, stream=True), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            number += line.startswith("data: {")
    return number


async def at_once(server: Server, num_clients: int, num_each: int, num_tokens: int, *, streamed: bool) -> int:
    """Each client asks one request after the other; returns the number of chunks."""

    async def ask(client: httpx.AsyncClient) -> int:
        number = 0
        for _ in range(num_each):
            if streamed:
                number += await stream(client, num_tokens)
            else:
                (await client.post("/v1/chat/completions", json=chat(num_tokens))).raise_for_status()
        return number

    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        return sum(await asyncio.gather(*(ask(client) for _ in range(num_clients))))


def measure_texts(servers: dict[str, Server], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of front end by chunk, and chats per second, by server and number of clients."""
    chunk: dict[str, dict[int, list[float]]] = {name: {clients: [] for clients in STREAMING} for name in servers}
    rate: dict[str, dict[int, list[float]]] = {name: {clients: [] for clients in CLIENTS} for name in servers}
    for server in servers.values():
        asyncio.run(at_once(server, 8, 2, 16, streamed=True))
    for run in range(options.runs):
        in_turn = list(servers.items())[:: 1 if run % 2 else -1]
        for clients in STREAMING:
            for name, server in in_turn:
                before = server.cpu_s()
                number = asyncio.run(at_once(server, clients, options.requests, options.tokens, streamed=True))
                chunk[name][clients].append((server.cpu_s() - before) / number * 1e6)
        for clients in CLIENTS:
            for name, server in in_turn:
                number = max(clients, options.requests * 8)
                started_at = time.perf_counter()
                asyncio.run(at_once(server, clients, number // clients, 8, streamed=False))
                rate[name][clients].append(number // clients * clients / (time.perf_counter() - started_at))
    return {"chunk_us": _medians(chunk), "rate": _medians(rate)}


def _medians(values: dict[str, dict[int, list[float]]]) -> dict[str, dict[int, float]]:
    return {
        name: {clients: round(statistics.median(ones), 1) for clients, ones in by_clients.items()}
        for name, by_clients in values.items()
    }


def measure_starts(
    language: Path, omni: Path, started: dict[str, tuple[float, int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds and bytes, by what is started.

    Args:
        started: both of servers that were started before; a short run starts no other ones of these kinds, and spawns
            no stages, each of which imports vLLM.
    """
    starts: dict[str, tuple[Path, tuple[str, ...], dict[str, str]]] = {
        "stock": (language, (), {}),
        "one stage": (language, ("--omni",), {}),
        "three forked": (omni, ("--omni",), {"VLLM_OMNI_FORK_SERVER": "1"}),
        "three spawned": (omni, ("--omni",), {"VLLM_OMNI_FORK_SERVER": "0"}),
    }
    if options.short:
        del starts["three spawned"]
    ready: dict[str, list[float]] = {name: [] for name in starts}
    memory: dict[str, list[int]] = {name: [] for name in starts}
    if options.short:
        for name, (ready_s, num_bytes) in started.items():
            ready[name].append(ready_s)
            memory[name].append(num_bytes)
            del starts[name]
    for run in range(options.runs):
        for name in list(starts)[:: 1 if run % 2 else -1]:
            model, flags, variables = starts[name]
            with serve(model, *flags, **variables) as server:
                body = chat(8, **SPOKEN) if model == omni else chat(8)
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
                ready[name].append(server.ready_s)
                memory[name].append(server.memory())
    return {
        "ready_s": {name: round(statistics.median(ones), 1) for name, ones in ready.items()},
        "memory_gb": {name: round(statistics.median(ones) / 1e9, 2) for name, ones in memory.items()},
    }


def read_bound(kind: str, index: int) -> dict[str, Any]:
    """A chat whose prompt costs more than its one token; no two have the same picture."""
    if kind == "text":
        return chat(1) | {"messages": [{"role": "user", "content": f"{index} Tell me more. " * 25}]}
    pixels = np.random.default_rng(index).integers(0, 255, (512, 512, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return chat(1) | {"messages": [{"role": "user", "content": parts}]}


async def in_parallel(server: Server, bodies: Sequence[dict[str, Any]]) -> None:
    """Clients with a connection each ask for all of them."""
    waiting = list(bodies)

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while waiting:
                (await client.post("/v1/chat/completions", json=waiting.pop())).raise_for_status()

    await asyncio.gather(*(ask() for _ in range(NUM_AT_FRONT_ENDS)))


def measure_front_ends(language: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Requests per second, by what is read and the number of front ends."""
    numbers = range(1, options.front_ends + 1)
    rates: dict[str, dict[int, list[float]]] = {kind: {number: [] for number in numbers} for kind in ("text", "image")}
    num_requests = options.requests * 2 * NUM_AT_FRONT_ENDS
    with ExitStack() as stack:
        servers = {
            number: stack.enter_context(serve(language, "--omni", f"--api-server-count={number}")) for number in numbers
        }
        for run in range(-1, options.runs):  # the first is the warm-up
            for kind, of_kind in rates.items():
                bodies = [read_bound(kind, (run + 1) * num_requests + index) for index in range(num_requests)]
                for number in numbers[:: 1 if run % 2 else -1]:
                    started_at = time.perf_counter()
                    asyncio.run(in_parallel(servers[number], bodies))
                    if run >= 0:
                        of_kind[number].append(num_requests / (time.perf_counter() - started_at))
    return {"front_ends": _medians(rates)}


def print_front_ends(figures: dict[str, dict[int, float]]) -> None:
    numbers = list(figures["text"])
    print("\n| requests/s, front ends | " + " | ".join(map(str, numbers)) + " |")
    print("|---|" + "---|" * len(numbers))
    for kind, rates in figures.items():
        print(f"| {kind} | " + " | ".join(map(str, rates.values())) + " |")


def print_tables(found: dict[str, Any]) -> None:
    for title, figures in (("front end, us a chunk", found["chunk_us"]), ("chats/s of 8 tokens", found["rate"])):
        clients = list(figures["stock"])
        print(f"\n| {title} | " + " | ".join(f"{number} clients" for number in clients) + " |")
        print("|---|" + "---|" * len(clients))
        for name, values in figures.items():
            print(f"| {name} | " + " | ".join(str(value) for value in values.values()) + " |")
        ratios = [figures["omni"][number] / figures["stock"][number] for number in clients]
        print("| omni / stock | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    print("\n| | ready after, s | memory, GB |\n|---|---|---|")
    for name, ready_s in found["ready_s"].items():
        print(f"| {name} | {ready_s} | {found['memory_gb'][name]} |")


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # of the servers; not at import: tests import this module
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each measurement")
    parser.add_argument("--requests", type=int, default=4, help="of each streaming client")
    parser.add_argument("--tokens", type=int, default=256, help="of a streamed chat")
    parser.add_argument("--short", action="store_true", help="one short run, to see that it works")
    parser.add_argument("--front-ends", type=int, default=3, help="the most that are measured")
    parser.add_argument("--only-front-ends", action="store_true", help="measure nothing but several front ends")
    options = parser.parse_args(arguments)
    if options.short:
        options.runs, options.requests, options.tokens, options.front_ends = 1, 1, 8, 2
    with tempfile.TemporaryDirectory() as name:
        language, omni = llava.build(Path(name) / "language"), qwen2_5_omni.build(Path(name) / "omni")
        found = measure_front_ends(language, options)
        if not options.only_front_ends:
            with serve(language) as stock, serve(language, "--omni") as ours:
                found |= measure_texts({"stock": stock, "omni": ours}, options)
                started = {"stock": (stock.ready_s, stock.memory()), "one stage": (ours.ready_s, ours.memory())}
            found |= measure_starts(language, omni, started, options)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(f"\n{machine}; medians of {options.runs} runs")
    print_front_ends(found["front_ends"])
    if not options.only_front_ends:
        print_tables(found)
    print(json.dumps({"benchmark": "serve", "machine": machine, "runs": options.runs, **found}))


if __name__ == "__main__":
    main()
