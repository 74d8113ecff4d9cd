"""Requests of several keys take turns."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from tests.fuzz import seeds
from tests.server import SHORT, Server, serve
from vllm_omni.config import load_config
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.cli.serve import share_fairly as with_priorities
from vllm_omni.entrypoints.openai.fair_keys import FairShare, share_fairly, take_turns
from vllm_omni.errors import ConfigError
from vllm_omni.testing import qwen2_5_omni

# -- the tags ----------------------------------------------------------------------------------------------------------


def test_a_request_goes_before_those_that_another_key_sent_before() -> None:
    share = FairShare()
    with ExitStack() as open_ones:
        burst = [open_ones.enter_context(share.tag("a")) for _ in range(5)]
        other = open_ones.enter_context(share.tag("b"))
        assert burst == [0, 1, 2, 3, 4]
        assert other == burst[0]
        assert open_ones.enter_context(share.tag("b")) == burst[1]


def test_a_key_gains_nothing_by_having_been_idle() -> None:
    share = FairShare()
    with ExitStack() as open_ones:
        for _ in range(3):  # of "a", one after the other: "b" sends none
            with share.tag("a"):
                pass
        a, b = (open_ones.enter_context(share.tag(key)) for key in "ab")
        assert a == b == 3


def test_tags_stay_above_those_of_requests_that_are_open() -> None:
    """So that no request waits forever."""
    share = FairShare()
    with share.tag("a"), share.tag("a") as waits:
        for _ in range(waits):
            with share.tag("b"):
                pass
        with share.tag("b") as last:
            assert last >= waits


def test_nothing_is_kept_of_keys_without_requests() -> None:
    share = FairShare()
    with share.tag("open"):
        for number in range(1000):
            with share.tag(f"key {number}"):
                pass
    assert not share._next and not share._open


@pytest.mark.fuzz
def test_what_keys_get_of_an_engine_differs_by_one_request_while_all_have_some_waiting() -> None:
    for seed in seeds(50):
        lot, share = random.Random(seed), FairShare()
        keys = [f"key {number}" for number in range(lot.randint(2, 5))]
        waiting: list[tuple[int, int, str, Any]] = []
        served: Counter[str] = Counter()
        for number in range(200):
            for key in keys:  # each keeps between 1 and 20 waiting
                while sum(one[2] == key for one in waiting) < lot.randint(1, 20):
                    request = share.tag(key)
                    waiting.append((request.__enter__(), len(waiting) + 1000 * number, key, request))
            waiting.sort(key=lambda one: one[:2])
            _, _, key, request = waiting.pop(0)
            request.__exit__(None, None, None)
            served[key] += 1
        assert max(served.values()) - min(served[key] for key in keys) <= len(keys), seed


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    async def answer(raw_request: Request) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"priority": raw_request.headers.get("X-Vllm-Priority")}

    app.post("/v1/chat/completions")(answer)
    app.get("/v1/models")(answer)
    share_fairly(app, take_turns(FairShare()))
    return app


async def test_requests_to_a_model_have_the_priority_of_their_turn_instead_of_their_own(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:

        async def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}", "X-Vllm-Priority": "-5"}
            return int((await client.post("/v1/chat/completions", headers=headers)).json()["priority"])

        assert sorted(await asyncio.gather(*(ask(key) for key in "aaab"))) == [0, 0, 1, 2]
        assert (await client.get("/v1/models", headers={"X-Vllm-Priority": "-5"})).json() == {"priority": "-5"}


def test_fairness_needs_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_serve_args(["model", "--fair-api-keys", "--api-key", "one"])
    assert "--fair-api-keys: needs keys to be fair to: --api-key KEY KEY ..." in capsys.readouterr().err


def test_stages_that_generate_tokens_run_by_priority_or_the_deployment_is_wrong(tmp_path: Path) -> None:
    model = qwen2_5_omni.build(tmp_path / "model")
    policies = [stage.engine_args.get("scheduling_policy") for stage in with_priorities(load_config(model)).stages]
    assert policies == ["priority", "priority", None]
    with pytest.raises(ConfigError, match="stage 'thinker' has scheduling_policy = 'fcfs': leave it out"):
        with_priorities(load_config(model, scheduling_policy="fcfs"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("fair")
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", "--skip-mm-profiling"]
    flags += ["--stage=thinker.max_num_seqs=1", "--fair-api-keys", "--api-key", "a", "b"]
    with serve(qwen2_5_omni.build(directory / "model"), directory / "log", *flags, TORCHDYNAMO_DISABLE="1") as server:
        yield server


@pytest.mark.long
async def test_a_chat_does_not_wait_for_all_that_another_key_has_sent_before(server: Server) -> None:
    ended: list[str] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask(key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**SHORT, "max_tokens": 40, "ignore_eos": True}
            (await client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
            ended.append(key)

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(ask("a"))
            started_at = time.monotonic()
            while not ended:  # the engine is at work, the others wait in it
                await asyncio.sleep(0.01)
                assert time.monotonic() < started_at + 60
            group.create_task(ask("b"))
    assert ended.index("b") < 8, ended
