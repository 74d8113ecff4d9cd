"""What several front ends of one server know together: adapters, the registry, uploaded voices; and one that stands
still.
"""

import asyncio
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import soundfile
from vllm.lora.request import LoRARequest

from tests.e2e.test_epd_recovery import RANK, adapter
from tests.e2e.test_front_ends import FrontEnds, ask
from tests.e2e.test_qwen3_tts_server import FLAGS, SAY, wav
from tests.e2e.test_replicas import published, redis_url
from tests.server import SHORT, START_TIMEOUT_S, serve, wait_for
from vllm_omni.testing.qwen3_tts import build

__all__ = ["adapter", "redis_url"]  # fixtures

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STUCK_S = 10
NUM_AT_ONCE = 16


@pytest.fixture
def language_model(
    llava_checkpoint: Path, adapter: LoRARequest, redis_url: str, tmp_path: Path
) -> Iterator[tuple[FrontEnds, str]]:
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=256", "--api-server-count=2", "--enable-lora"]
    flags += [f"--max-lora-rank={RANK}", f"--lora-modules=adapted={adapter.lora_path}"]
    flags.append(f"--replica-registry={redis_url}")
    with (
        serve(llava_checkpoint, tmp_path / "log", *flags, VLLM_OMNI_STAGE_STUCK_S=str(STUCK_S)) as server,
        closing(FrontEnds(server, 2)) as front_ends,
    ):
        yield front_ends, redis_url


def test_each_has_the_adapters_and_the_registry_has_the_engines_also_after_one_was_stopped(
    language_model: tuple[FrontEnds, str],
) -> None:
    front_ends, url = language_model

    def texts() -> list[str]:
        asked = [ask(one, SHORT | {"model": model}) for one in front_ends.each() for model in ("tiny", "adapted")]
        return [answer["choices"][0]["message"]["content"] for answer in asked]

    for client in front_ends.each():
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "adapted"]
    plain, adapted = texts()[:2]
    assert texts() == [plain, adapted, plain, adapted] and plain != adapted
    wait_for("the heartbeat", lambda: asyncio.run(published(url, front_ends.server)) == {"language": "running"})

    long = SHORT | {"max_tokens": 64, "ignore_eos": True}
    ((alone, _),) = under_load(front_ends.server.url, long, 1)
    (stopped, _), (_, other) = front_ends.clients.items()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(under_load, front_ends.server.url, long, NUM_AT_ONCE)
        wait_for("requests run", lambda: running(other) > 0)
        psutil.Process(stopped).suspend()
        for _ in range(4):  # those that are accepted by the other go on
            assert ask(other, SHORT)["choices"][0]["message"]["content"] == plain
        ends = load.result()
    assert {text for text, _ in ends if text} == {alone}
    assert all(text or isinstance(error, httpx.TransportError) for text, error in ends), ends

    def restarts() -> list[int]:
        return [one["num_restarts"] for one in other.get("/health").json()["front_ends"].values()]

    wait_for("it is replaced", lambda: sorted(restarts()) == [0, 1], START_TIMEOUT_S)
    front_ends.connect()
    assert stopped not in front_ends.clients and not psutil.pid_exists(stopped)
    assert texts() == [plain, adapted, plain, adapted]
    wait_for("the engine holds nothing", lambda: running(front_ends.each()[0]) == 0)


def running(client: httpx.Client) -> float:
    """Requests in the engine, of any front end."""
    lines = re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (.+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(map(float, lines))


def under_load(url: str, body: dict[str, Any], number: int) -> list[tuple[str, Exception | None]]:
    """Ask over so many connections at once, which the front ends share; the texts, and why there is none."""

    def one(_: int) -> tuple[str, Exception | None]:
        try:
            with httpx.Client(base_url=url, timeout=START_TIMEOUT_S) as client:
                return ask(client, body)["choices"][0]["message"]["content"], None
        except httpx.TransportError as exc:
            return "", exc

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(one, range(number)))


def test_a_voice_that_one_was_given_is_spoken_and_deleted_by_the_other(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny", variant="clone")
    voices = str(tmp_path / "voices")
    with (
        serve(model, tmp_path / "log", *FLAGS, "--api-server-count=2", VLLM_OMNI_VOICES_DIR=voices) as server,
        closing(FrontEnds(server, 2)) as front_ends,
    ):
        one, other = front_ends.each()

        def speak(client: httpx.Client) -> httpx.Response:
            return client.post("/v1/audio/speech", json={**SAY, "model": "tiny", "voice": "bob"})

        files = {"audio_sample": ("a.wav", wav(1.0), "audio/wav")}
        assert one.post("/v1/audio/voices", data={"name": "bob"}, files=files).status_code == 200
        for client in (one, other):
            said = speak(client)
            assert said.status_code == 200 and len(soundfile.read(io.BytesIO(said.content))[0]), said.text[:500]
        assert other.delete("/v1/audio/voices/bob").status_code == 200
        gone = speak(one)
        assert gone.status_code == 400 and "bob" in gone.json()["error"]["message"]
