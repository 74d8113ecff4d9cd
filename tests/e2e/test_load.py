"""A server under load: requests of every kind at once, clients that leave, requests that are wrong."""

import asyncio
import base64
import io
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from tests.fuzz import seeds
from tests.media.test_video import decode
from tests.server import Server, install_pipeline, serve, wait_for
from vllm_omni.testing import diffusion, qwen2_5_omni

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_REQUESTS = 200  # at once
LEAVING, MALFORMED = 0.2, 0.05  # shares of them
TOLERANCE = 1e-3  # of a sound's largest sample, between batches of different sizes
LEVELS = 2  # of 255, likewise
WARM_UP = (-1, -2, -3, -4)  # seeds
NUM_AT_A_LOSS = 40
GROWTH = 96 << 20  # bytes that a warm server may grow by under the same load, three times: allocators keep some

STAGES: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 12},
    "token2wav": {"seed": 0},
    "painter": {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 3, "guidance_scale": 0.0},
    "filmer": {"num_inference_steps": 2, "height": 32, "width": 32, "num_frames": 5, "seed": 1},
}
FILM = {"size": "32x32", "seed": 1, "num_inference_steps": 2, "num_frames": 5, "fps": 8}
OPEN = ("queued", "in_progress")
WORDS = (
    "Hello.",
    "Who are you?",
    "Tell me a story.",
    "x",
    "Numbers: 1, 2, 3!",
    "And a longer question, about the sea?",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("studio")
    deployment, path = install_pipeline(directory, "studio", "tests.e2e.studio:StudioPipeline")
    models = {"painter": "z-image", "filmer": "wan2.2-t2v"}
    flags = [deployment, "--dtype=float32", "--enforce-eager"]
    flags += ["--max-model-len=512", "--skip-mm-profiling"]
    flags += [f"--stage={stage}.kv_cache_memory_bytes={64 << 20}" for stage in ("thinker", "talker")]
    flags += [f"--stage={stage}.model={diffusion.build(directory / stage, name)}" for stage, name in models.items()]
    checkpoint = qwen2_5_omni.build(directory / "omni")
    variables = {"PYTHONPATH": path, "VLLM_OMNI_FILES_DIR": str(files), "TORCHDYNAMO_DISABLE": "1"}
    variables |= {"VLLM_OMNI_STAGE_STUCK_S": "10", "VLLM_OMNI_STAGE_RESTARTS": "100"}
    variables["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # it fills for minutes, with a kernel for each shape of a batch
    with serve(checkpoint, directory / "log", *flags, **variables) as server:
        yield server


# -- requests of each kind, and what is compared of their answers ------------------------------------------------------


def picture() -> str:
    file = io.BytesIO()
    Image.fromarray(np.arange(56 * 84 * 3, dtype=np.uint8).reshape(56, 84, 3)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat_of(text: str, *modalities: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return {
        "model": "tiny",
        "messages": messages,
        "modalities": list(modalities),
        "sampling_params_list": STAGES,
        "audio": {"voice": "Ethan", "format": "pcm16"},
        **more,
    }


async def chat(client: httpx.AsyncClient, text: str) -> Any:
    answer = await post(client, "/v1/chat/completions", chat_of(text, "text"))
    return answer["choices"][0]["message"]["content"]


async def chat_about_a_picture(client: httpx.AsyncClient, text: str) -> Any:
    body = chat_of(text, "text")
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": picture()}})
    return (await post(client, "/v1/chat/completions", body))["choices"][0]["message"]["content"]


async def streamed_speech(client: httpx.AsyncClient, text: str) -> Any:
    words, sound, body = "", b"", chat_of(text, "text", "audio", stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Failed((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise Failed(line)
                delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
                words += delta.get("content") or ""
                sound += base64.b64decode((delta.get("audio") or {}).get("data") or "")
    return words, np.frombuffer(sound, np.int16) / 32768


async def speech(client: httpx.AsyncClient, text: str) -> Any:
    params = {stage: STAGES[stage] for stage in ("talker", "token2wav")}
    body = {"model": "tiny", "input": text, "voice": "Ethan", "response_format": "wav", "sampling_params_list": params}
    response = await client.post("/v1/audio/speech", json=body)
    if response.status_code != 200:
        raise Failed(response.text)
    return soundfile.read(io.BytesIO(response.content))[0]


async def painting(client: httpx.AsyncClient, text: str) -> Any:
    params = {"num_inference_steps": 2, "size": "64x64", "seed": 3, "guidance_scale": 0.0}
    answer = await post(client, "/v1/images/generations", {"prompt": text, **params})
    return np.array(Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))).astype(int)


async def film(client: httpx.AsyncClient, text: str) -> Any:
    """As a job, which is deleted at its end, also where its client leaves."""
    video = (await post(client, "/v1/videos", {"prompt": text, **FILM}))["id"]
    try:
        while (state := (await client.get(f"/v1/videos/{video}")).json())["status"] in OPEN:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        if state["status"] != "completed":
            raise Failed(str(state))
        return decode((await client.get(f"/v1/videos/{video}/content")).content)[0].numpy().astype(int)
    finally:
        with anyio.CancelScope(shield=True):
            deleted = await client.delete(f"/v1/videos/{video}")
        assert deleted.status_code == 200, deleted.text


async def post(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise Failed(response.text)
    return response.json()


class Failed(Exception):
    """What the server says of a request that it did not answer."""


Ask = Callable[[httpx.AsyncClient, str], Awaitable[Any]]
KINDS: dict[Ask, float] = {  # and their shares
    chat: 6,
    chat_about_a_picture: 3,
    streamed_speech: 4,
    speech: 3,
    painting: 3,
    film: 1,
}

NEEDS: dict[str, Ask] = {
    "thinker": chat,
    "talker": speech,
    "token2wav": speech,
    "painter": painting,
    "filmer": film,
}

WRONG: list[tuple[str, bytes]] = [
    ("/v1/chat/completions", b'{"messages": ['),
    ("/v1/chat/completions", json.dumps(chat_of("x", "smell")).encode()),
    ("/v1/chat/completions", json.dumps(chat_of("x", "text", temperature=-1)).encode()),
    ("/v1/chat/completions", json.dumps(chat_of("x " * 5000, "text")).encode()),
    ("/v1/audio/speech", b'{"input": 3}'),
    ("/v1/audio/speech", b'{"input": "x", "voice": "nobody"}'),
    ("/v1/images/generations", b'{"prompt": "x", "size": "63x64"}'),
    ("/v1/images/generations", b'{"prompt": "x", "sede": 1}'),
    ("/v1/videos", b'{"prompt": "x", "frames": 5}'),
    ("/v1/videos", b"\xff\xfe"),
]


def check(kind: Ask, answer: Any, expected: Any) -> None:
    if kind is streamed_speech:
        assert answer[0] == expected[0]
        answer, expected = answer[1], expected[1]
    if isinstance(expected, str):
        assert answer == expected
    elif kind in (speech, streamed_speech):
        assert answer.shape == expected.shape
        assert np.abs(answer - expected).max() <= TOLERANCE * np.abs(expected).max() + 1 / 32768
    else:
        assert answer.shape == expected.shape
        difference = np.abs(answer - expected)
        assert (difference.mean() if kind is film else difference.max()) <= LEVELS, difference.max()  # H.264 has losses


# -- load --------------------------------------------------------------------------------------------------------------


async def send(client: httpx.AsyncClient, lot: random.Random, expected: dict[tuple[Ask, str], Any]) -> str:
    """One request; returns how it ended."""
    if lot.random() < MALFORMED:
        path, body = lot.choice(WRONG)
        response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500, (path, body, response.text)
        return "rejected"
    (kind,) = lot.choices(list(KINDS), list(KINDS.values()))
    text = lot.choice(WORDS)
    if lot.random() < LEAVING:
        # A cancellation by asyncio would interrupt httpcore while it closes connections, which would stay open.
        with anyio.move_on_after(lot.random() * 8) as stay:
            await kind(client, text)
        return "left" if stay.cancelled_caught else kind.__name__
    check(kind, await kind(client, text), expected[kind, text])
    return kind.__name__


async def storm(
    server: Server, seed: int, expected: dict[tuple[Ask, str], Any], num_requests: int = NUM_REQUESTS, lost: str = ""
) -> Counter[str]:
    """Requests at once; returns how often each end occurred.

    Args:
        lost: the stage whose engine is lost meanwhile: requests may fail for it, and say so.
    """

    async def one(lot: random.Random) -> str:
        try:
            return await send(client, lot, expected)
        except Failed as failed:
            assert lost and lost in str(failed), failed
            return "failed"

    lot, limits = random.Random(seed), httpx.Limits(max_connections=None)
    async with client_of(server, limits=limits) as client, asyncio.timeout(300):
        return Counter(await asyncio.gather(*(one(random.Random(lot.random())) for _ in range(num_requests))))


def client_of(server: Server, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=280, **more)


@pytest.fixture(scope="module")
async def expected(server: Server) -> AsyncIterator[dict[tuple[Ask, str], Any]]:
    """Each request alone."""
    async with client_of(server) as client:
        yield {(kind, text): await kind(client, text) for kind in KINDS for text in WORDS}


def processes(server: Server) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def memory_of(server: Server) -> int:
    return sum(one.memory_info().rss - one.memory_info().shared for one in processes(server))


def held_by(server: Server) -> dict[str, Any]:
    """What requests could leave behind."""
    leased = [
        line for line in server.get("/metrics").text.splitlines() if "leased" in line and line.startswith("vllm_omni:")
    ]
    return {
        "processes": sorted(one.pid for one in processes(server)),
        "threads of engines": [one.num_threads() for one in processes(server)[1:]],
        "leases": [line for line in leased if not line.endswith(" 0.0")],
    }


def media_in(files: Path) -> list[Path]:
    return [path for path in files.rglob("*") if path.suffix in (".mp4", ".part")]


async def test_a_mixed_load_is_answered_as_each_request_alone_and_leaves_nothing(
    server: Server, files: Path, expected: dict[tuple[Ask, str], Any]
) -> None:
    counts: Counter[str] = Counter()
    for seed in WARM_UP:
        counts += await storm(server, seed, expected)
    assert counts["left"] and counts["rejected"] and all(counts[kind.__name__] for kind in KINDS)
    wait_for("the server holds nothing", server.holds_nothing, 60)
    before, memory = held_by(server), memory_of(server)
    for seed in seeds(3):
        await storm(server, seed, expected)
        wait_for("the server holds nothing", server.holds_nothing, 60)
    assert held_by(server) == before
    assert memory_of(server) <= memory + GROWTH
    for job in server.get("/v1/videos").json()["data"]:  # of clients that left before they were told its id
        assert job["status"] == "completed"
        server.client.delete(f"/videos/{job['id']}", cast_to=object)
    assert media_in(files) == []
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:5000]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_each_engine_that_is_lost_under_load_fails_its_requests_alone_and_comes_back(
    server: Server, expected: dict[tuple[Ask, str], Any], number: signal.Signals
) -> None:
    for seed, stage in enumerate(STAGES):
        before = len(processes(server))
        (engine,) = [one for one in processes(server) if f"::{stage}::" in " ".join(one.cmdline())]
        running = asyncio.ensure_future(storm(server, seed, expected, NUM_AT_A_LOSS, stage))
        await asyncio.sleep(1)
        engine.send_signal(number)
        async with client_of(server) as client:  # nobody misses an engine that nobody asks
            with suppress(Failed):
                await NEEDS[stage](client, WORDS[0])
        counts = await running
        assert sum(counts[kind.__name__] for kind in KINDS), counts
        await asyncio.to_thread(wait_for, f"{stage} is back", partial(is_whole, server, before), 90)
        assert not engine.is_running()
        await storm(server, seed, expected, NUM_AT_A_LOSS)
        await asyncio.to_thread(wait_for, "the server holds nothing", server.holds_nothing, 60)


def is_whole(server: Server, num_processes: int) -> bool:
    return server.get("/health").status_code == 200 and len(processes(server)) == num_processes
