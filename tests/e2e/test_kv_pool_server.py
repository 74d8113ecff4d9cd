"""A server that is stopped and started again has the KV pages of its conversations."""

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.redis_server import start_redis
from tests.server import Server, serve, wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # the engines' own: tests/e2e/test_kv_pool.py

TEXT = " ".join(f"w{number}" for number in range(80))
NUM_TRIES = 6


def answer(server: Server, more: str = "", *, first: str = "") -> tuple[str, int]:
    """The text, and how many of the prompt's tokens were cached."""
    turn: Any = [{"role": "user", "content": f"{first} {TEXT} {more}".strip()}]
    reply = server.client.chat.completions.create(model="tiny", messages=turn, max_tokens=8, temperature=0.0)
    details = reply.usage.prompt_tokens_details
    return reply.choices[0].message.content, details.cached_tokens if details is not None else 0


def hits(server: Server, media: str = "memory|disk") -> float:
    pattern = rf'vllm:kv_pool_hits_total\{{.*medium="(?:{media})".*\}} ([0-9.e+]+)'
    return sum(float(value) for value in re.findall(pattern, server.get("/metrics").text))


def flags_of(directory: Path, **more: object) -> list[str]:
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=256", "--block-size=32", "--kv-pool=8388608"]
    keys = {"directory": directory, "staging_bytes": 4194304, **more}
    stage = [f"--stage=language.kv_pool.{key}={value}" for key, value in keys.items()]
    return [*flags, "--enable-prompt-tokens-details", *stage]


def read_by_another(one: Server, other: Server, *, first: str) -> bool:
    """Whether the other has the pages of a prompt that is new to both. On a busy machine an answer of Redis may come
    too late, and then it computes them.
    """
    text, num_cached = answer(one, first=first)
    assert num_cached == 0
    time.sleep(1.0)  # pages are written and announced in the background
    of_other, num_cached = answer(other, first=first)
    assert of_other == text
    return num_cached >= 64


def test_the_next_server_reads_the_pages_of_the_last(llava_checkpoint: Path, tmp_path: Path) -> None:
    texts = []
    for index in range(2):
        with serve(llava_checkpoint, tmp_path / "log", *flags_of(tmp_path / "slabs")) as server:
            text, num_cached = answer(server)
            texts.append(text)
            assert (num_cached >= 64) == bool(index)
            if index:  # counters come with the statistics of a step, which may be behind the answer
                wait_for("the counters", lambda: hits(server) >= 2)
            else:
                assert hits(server) == 0
    assert texts[0] == texts[1]


def test_a_server_of_another_host_reads_them_through_redis(llava_checkpoint: Path, tmp_path: Path) -> None:
    """Two servers with directories of their own, a secret, one Redis with a password, and in the end none."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    process, url = start_redis(tmp_path)
    with Redis.from_url(url) as client:
        client.config_set("requirepass", "hunter2")
    url = url.replace("unix://", "unix://:hunter2@")
    try:
        with ExitStack() as stack:
            one, other = (
                stack.enter_context(
                    serve(
                        llava_checkpoint,
                        tmp_path / f"{name}.log",
                        *flags_of(tmp_path / name, redis=url, token_file=token),
                    )
                )
                for name in ("one", "other")
            )
            tries = (read_by_another(one, other, first=f"w{number}") for number in range(90, 90 + NUM_TRIES))
            assert any(tries)
            wait_for("the counters", lambda: answer(other) and hits(other, "remote") >= 2)
            assert hits(one, "remote") == 0
            assert "vllm:kv_pool_read_seconds_count{" in other.get("/metrics").text
            with Redis.from_url(url) as client:
                (leases,) = client.keys("*}:n")
                nodes = [lease[8:].decode() for lease in client.hgetall(leases).values()]
            process.kill()
            process.wait(10)
            texts = [[answer(server, more)[0] for more in ("", "and the next turn")] for server in (one, other)]
            assert texts[0] == texts[1]
    finally:
        process.kill()
        process.wait(10)
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("one", "other")]
    assert len(nodes) == 2 and all(
        secret not in log for log in logs for secret in ("hunter2", *(n[-32:] for n in nodes))
    )
    assert "is not used until it answers" in logs[0]
