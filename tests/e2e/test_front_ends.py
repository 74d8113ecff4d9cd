"""Several front ends of one server (``--api-server-count``): answers, limits, metrics and ends are those of one."""

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from websockets.asyncio.client import connect

from tests import zygote
from tests.entrypoints.openai.test_media_routes import FILM, WITH_PICTURE
from tests.server import (
    MAX_MODEL_LEN,
    SHORT,
    STAGES,
    START_TIMEOUT_S,
    Server,
    engine_core,
    free_port,
    is_up,
    read_audio,
    serve,
    wait_for,
)
from tests.shared_engines import QWEN_SERVER, SharedEngines

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT = 4  # requests of the talker at a time
CHAT = "/v1/chat/completions"
SPOKEN: dict[str, Any] = {**SHORT, "modalities": ["text", "audio"], "sampling_params_list": STAGES}
LONG: dict[str, Any] = {  # longer than any test
    **SPOKEN,
    "max_tokens": 900,
    "stream": True,
    "sampling_params_list": {**STAGES, "talker": {"temperature": 0.0, "max_tokens": 900}},
}
ENDING_S = 60.0


class FrontEnds:
    """A server with several front ends, and a client that keeps a connection to each of them."""

    def __init__(self, server: Server, number: int, **headers: str) -> None:
        self.server = server
        self._number = number
        self._headers = headers
        self.clients: dict[int, httpx.Client] = {}  # process id of a front end -> client
        self.connect()

    def connect(self) -> None:
        """Connections are spread over the front ends: a few are enough to reach each."""
        self.close()
        deadline = time.monotonic() + ENDING_S
        while len(self.clients) < self._number:
            assert time.monotonic() < deadline, f"only {sorted(self.clients)} accept connections"
            client = httpx.Client(base_url=self.server.url, timeout=ENDING_S, headers=self._headers)
            try:
                response = client.get("/v1/models")
                port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                pid = self._process_of(port)
            except httpx.TransportError:
                pid = 0
            if pid and pid not in self.clients:
                self.clients[pid] = client
            else:
                client.close()

    def _process_of(self, port: int) -> int:
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            connections = process.net_connections("tcp4")
            if any(one.raddr and one.raddr.port == port and one.status == "ESTABLISHED" for one in connections):
                return process.pid
        return 0

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def each(self) -> list[httpx.Client]:
        return list(self.clients.values())

    def metric(self, name: str) -> list[float]:
        """The value of a line of /metrics, by each front end."""
        lines = [re.findall(rf"^{name} (\S+)$", one.get("/metrics").text, re.MULTILINE) for one in self.each()]
        return [float(value) for (value,) in lines]


@pytest.fixture(scope="module")
def own_server(shared_engines: SharedEngines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of the checkpoint of the server with one front end, with the flags that change its answers."""
    shared_engines.get(QWEN_SERVER)
    flags = ["--dtype=float32", "--enforce-eager", f"--max-model-len={MAX_MODEL_LEN}", "--skip-mm-profiling"]
    flags += ["--stage=thinker.max_num_seqs=16", f"--stage=talker.max_num_queued_reqs={LIMIT}"]
    flags.append("--api-server-count=2")
    log = tmp_path_factory.mktemp("front-ends") / "log"
    variables = {"VLLM_LOGGING_LEVEL": None, "TORCHDYNAMO_DISABLE": "1"}
    with serve(shared_engines.directory(QWEN_SERVER) / "checkpoint", log, *flags, **variables) as server:
        yield server


@pytest.fixture
def front_ends(own_server: Server) -> Iterator[FrontEnds]:
    front_ends = FrontEnds(own_server, 2)
    yield front_ends
    front_ends.close()
    wait_for("the engines hold nothing", own_server.holds_nothing)


@pytest.fixture
def single(engines: SharedEngines) -> Iterator[httpx.Client]:
    """A client of a server with one front end."""
    with httpx.Client(base_url=engines.get(QWEN_SERVER).url, timeout=ENDING_S) as client:
        yield client


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text[:500]
    answer: dict[str, Any] = response.json()
    return answer


def events(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@contextmanager
def speaking(client: httpx.Client, number: int) -> Iterator[list[Iterator[str]]]:
    """The lines of streams that have started, each on a connection of its own.

    The first is the client's, to its front end; another front end may accept the others.
    """
    with ExitStack() as stack:
        streams = []
        for _ in range(number):
            lines = stack.enter_context(client.stream("POST", CHAT, json=LONG)).iter_lines()
            while '"content":""' in (line := next(lines)) or not line:  # the engines have not answered
                pass
            streams.append(lines)
        yield streams


# -- answers -----------------------------------------------------------------------------------------------------------


def test_text_and_speech_of_each_front_end_are_those_of_one(front_ends: FrontEnds, single: httpx.Client) -> None:
    expected = ask(single, {**SPOKEN, "logprobs": True, "top_logprobs": 2, "return_token_ids": True})
    (choice,) = expected["choices"]
    sound = read_audio(choice["message"]["audio"]["data"])
    for client in front_ends.each():
        (answer,) = ask(client, {**SPOKEN, "logprobs": True, "top_logprobs": 2, "return_token_ids": True})["choices"]
        assert answer["message"]["content"] == choice["message"]["content"]
        assert answer["token_ids"] == choice["token_ids"]
        assert answer["logprobs"] == choice["logprobs"]
        np.testing.assert_array_equal(read_audio(answer["message"]["audio"]["data"]), sound)


def test_streams_have_the_same_text_and_the_same_samples(front_ends: FrontEnds, single: httpx.Client) -> None:
    def read(client: httpx.Client) -> tuple[str, bytes]:
        deltas = [one["choices"][0]["delta"] for one in events(client, {**SPOKEN, "audio": {"format": "pcm16"}})]
        pieces = [(delta.get("audio") or {}).get("data") for delta in deltas]
        return "".join(delta.get("content") or "" for delta in deltas), b"".join(
            base64.b64decode(one) for one in pieces if one
        )

    text, sound = read(single)
    assert text and sound
    for client in front_ends.each():
        assert read(client) == (text, sound)


def test_media_are_read_in_the_front_end_also_those_that_another_has_sent(
    front_ends: FrontEnds, single: httpx.Client
) -> None:
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 56, 3), np.uint8)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {**SHORT, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]}
    expected = ask(single, body)["choices"][0]["message"]["content"]
    for client in front_ends.each() * 2:
        assert ask(client, body)["choices"][0]["message"]["content"] == expected
    assert front_ends.metric("vllm_omni:media_bytes") == [0.0, 0.0]


def test_speech_completions_and_errors_are_those_of_one(front_ends: FrontEnds, single: httpx.Client) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/audio/speech", {"model": "tiny", "input": "Hello.", "seed": 0, "max_new_tokens": 12, "voice": "Ethan"}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "temperature": 0.0, "n": 2}),
        (CHAT, {**SHORT, "temperatur": 1}),
        (CHAT, {**SHORT, "modalities": ["smell"]}),
        (CHAT, {**SHORT, "model": "none"}),
        (CHAT, {**SHORT, "stop_token_ids": [10**9]}),
        ("/v1/audio/speech", {"model": "tiny", "input": "Hello.", "voice": "Nobody"}),
        ("/v1/chat/completion", {}),
    ]
    # The ids of requests and the time of their arrival are their own.
    own = re.compile(rb'"(id|created|arrival)":("[^"]*"|\d+)')
    for path, body in requests:
        expected = single.post(path, json=body)
        for client in front_ends.each():
            response = client.post(path, json=body)
            assert response.status_code == expected.status_code, response.text[:500]
            assert own.sub(b"", response.content) == own.sub(b"", expected.content), path


async def test_texts_in_pieces_are_spoken_over_websockets_of_both(front_ends: FrontEnds) -> None:
    body = {"model": "tiny", "response_format": "pcm", "voice": "Ethan", "seed": 0, "max_new_tokens": 12}
    said = front_ends.each()[0].post("/v1/audio/speech", json={**body, "input": "Hello."}).content
    whole = np.frombuffer(said, "<i2")
    url = f"{front_ends.server.url.replace('http', 'ws')}/v1/audio/speech/stream"
    text = [{"type": "input.text", "text": piece} for piece in ("Hel", "lo.")]
    async with connect(url) as one, connect(url) as other:  # which reaches the front end with fewer connections
        for message in ({"type": "session.config", **body}, *text, {"type": "input.done"}):
            for connection in (one, other):
                await connection.send(json.dumps(message))
        for connection in (one, other):
            spoken = b"".join([piece async for piece in connection if isinstance(piece, bytes)])
            # Both at once: sums in another order may round a sample to the next level.
            np.testing.assert_allclose(np.frombuffer(spoken, "<i2"), whole, rtol=0, atol=1)


# -- what is one for all -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_aborts_its_request_in_the_engines(front_ends: FrontEnds) -> None:
    for client in front_ends.each():
        with speaking(client, 1):
            assert front_ends.metric("vllm_omni:num_open_calls") == [1.0, 1.0]
        wait_for("the request is aborted", front_ends.server.holds_nothing)


def test_requests_of_all_front_ends_count_in_the_limits_of_stages(front_ends: FrontEnds) -> None:
    one, other = front_ends.each()
    rejected = r'vllm_omni:requests_rejected_total\{stage="talker"\}'
    (before,) = set(front_ends.metric(rejected))
    with speaking(one, LIMIT - 1), speaking(other, 1):
        for client in (one, other):
            for body in (SPOKEN, {**SPOKEN, "stream": True}):
                response = client.post(CHAT, json=body)
                assert response.status_code == 429, response.text[:500]
                assert int(response.headers["Retry-After"]) >= 1
                assert f"talker' has {LIMIT} of at most {LIMIT} requests" in response.json()["error"]["message"]
            assert client.get("/ready").status_code == 429
            assert ask(client, {**SHORT, "modalities": ["text"]})
        assert front_ends.metric(rejected) == [before + 4] * 2
    wait_for("the requests are aborted", front_ends.server.holds_nothing)
    for client in (one, other):
        assert ask(client, SPOKEN)
        assert client.get("/ready").status_code == 200


def test_metrics_of_any_front_end_are_those_of_all(front_ends: FrontEnds) -> None:
    served = "vllm_omni:audio_duration_seconds_count"
    tokens = r'vllm:generation_tokens_total\{[^}]*stage="thinker"[^}]*\}'
    read = "vllm_omni:read_seconds_count"
    before = [front_ends.metric(name) for name in (served, tokens, read)]
    for client in front_ends.each() * 2:
        ask(client, SPOKEN)
    after = [front_ends.metric(name) for name in (served, tokens, read)]
    for (first, second), (was_first, was_second), step in zip(after, before, (1, 6, 1), strict=True):
        assert first == second and was_first == was_second
        assert first - was_first == 4 * step


def test_traces_health_and_replicas_are_the_same_by_each(front_ends: FrontEnds) -> None:
    one, other = front_ends.each()
    request_id = ask(one, SHORT)["id"]
    assert other.get(f"/traces/{request_id}").json() == one.get(f"/traces/{request_id}").json()
    health = other.get("/health").json()
    assert set(health["stages"]) == {"thinker", "talker", "token2wav"}
    assert set(health["front_ends"]) == {"front_end/0", "front_end/1"}
    assert {status["state"] for status in health["front_ends"].values()} == {"running"}
    assert one.get("/replicas").json() == other.get("/replicas").json()
    assert one.get("/omni/model").json() == other.get("/omni/model").json()
    assert len(one.get("/omni/state").json()["engines"]) == 3
    assert one.get("/omni").text == other.get("/omni").text


def test_an_engine_that_dies_is_reported_by_each_and_serves_each_again(front_ends: FrontEnds) -> None:
    core = engine_core(front_ends.server, "talker")
    core.kill()
    for client in front_ends.each():
        wait_for("the engine is down", lambda client=client: client.get("/health").status_code == 503)  # type: ignore[misc]
        response = client.post(CHAT, json={**SPOKEN, "stream": True})
        assert response.status_code == 503, response.text[:500]
        assert ask(client, {**SHORT, "modalities": ["text"]})
    wait_for("the engine is up", lambda: front_ends.each()[0].get("/health").status_code == 200, START_TIMEOUT_S)
    for client in front_ends.each():
        assert ask(client, SPOKEN)


def test_a_front_end_that_dies_loses_its_requests_alone_and_is_replaced(front_ends: FrontEnds) -> None:
    (lost, one), (_, other) = front_ends.clients.items()
    served = "vllm_omni:audio_duration_seconds_count"
    ask(one, SPOKEN)
    before = front_ends.metric(served)[0]
    with ThreadPoolExecutor() as pool, speaking(other, 1) as (lines,):
        with speaking(one, 1) as (broken,):
            psutil.Process(lost).kill()
            with pytest.raises(httpx.TransportError):
                pool.submit(list, broken).result(ENDING_S)
        wait_for("its requests are aborted", lambda: other.get("/omni/state").json()["num_open_calls"] == 1)
        assert next(line for line in lines if line).startswith("data: ")
    wait_for(
        "it is replaced",
        lambda: (
            other.get("/health").json()["front_ends"]["front_end/0"]["num_restarts"]
            + other.get("/health").json()["front_ends"]["front_end/1"]["num_restarts"]
            == 1
        ),
        START_TIMEOUT_S,
    )
    wait_for(
        "it runs",
        lambda: {one["state"] for one in other.get("/health").json()["front_ends"].values()} == {"running"},
        START_TIMEOUT_S,
    )
    front_ends.connect()
    assert lost not in front_ends.clients
    for client in front_ends.each():
        assert ask(client, SPOKEN)
    assert front_ends.metric(served) == [before + 2] * 2  # what it had counted remains


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_video_is_made_by_one_front_end_and_listed_fetched_and_deleted_by_another(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    files = str(tmp_path / "files")
    flags = ("--api-server-count=2", "--api-key=key")
    with serve(tiny_pipeline("wan2.2-i2v"), tmp_path / "log", *flags, VLLM_OMNI_FILES_DIR=files) as server:
        front_ends = FrontEnds(server, 2, Authorization="Bearer key")
        one, other = front_ends.each()
        body = {**FILM, **WITH_PICTURE}
        video = one.post("/v1/videos", json=body).json()["id"]
        wait_for("it is made", lambda: other.get(f"/v1/videos/{video}").json()["status"] == "completed", ENDING_S)
        content = [client.get(f"/v1/videos/{video}/content").content for client in (one, other)]
        assert content[0] == content[1] and len(content[0]) > 100
        long = one.post("/v1/videos", json={**body, "num_inference_steps": 900}).json()["id"]
        assert [one["id"] for one in other.get("/v1/videos").json()["data"]] == [long, video]
        assert other.delete(f"/v1/videos/{long}").json()["deleted"]
        wait_for("it is aborted", server.holds_nothing, ENDING_S)
        assert one.get(f"/v1/videos/{long}").status_code == 404
        front_ends.close()


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """With a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fronts-") as name:
        yield Path(name)


@pytest.mark.parametrize("how", ["SIGTERM to the server", "SIGKILL to the server", "Ctrl-C", "SIGTERM to all"])
def test_however_it_ends_nothing_is_left(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path, run_directory: Path, how: str
) -> None:
    """A pipeline of one stage: it starts soonest."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(tiny_pipeline("qwen-image")), "--omni"]
    command += ["--api-server-count=3", "--host=127.0.0.1", f"--port={port}", "--served-model-name=tiny"]
    env = os.environ | {"VLLM_OMNI_RUNTIME_DIR": str(run_directory)}
    with (tmp_path / "log").open("wb") as log:
        process = zygote.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, tmp_path / "log")
    wait_for(f"the server's start; its log: {server.log}", lambda: is_up(server), START_TIMEOUT_S)
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(list(run_directory.rglob("front_end-*.process"))) == 3
    maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in processes]
    shared = {path for one in maps for path in re.findall(r"/dev/shm/\S+", one)}
    match how:
        case "SIGTERM to the server":
            process.terminate()
        case "SIGKILL to the server":
            process.kill()
        case "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        case "SIGTERM to all":
            os.killpg(process.pid, signal.SIGTERM)
    status = process.wait(ENDING_S)
    assert not psutil.wait_procs(processes, ENDING_S)[1]
    assert list(run_directory.iterdir()) == []
    assert [path for path in shared if os.path.exists(path)] == []
    assert status == {"SIGKILL to the server": -signal.SIGKILL}.get(how, 0)
