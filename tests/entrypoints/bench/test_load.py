"""Load on a small server in this process, whose answers have the shapes of the real one."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.entrypoints.bench.media_server import NUM_PIECES, PIECE_S, MediaServer, wait_for
from vllm_omni.entrypoints.bench.load import Endpoint, Point, measure, open_session, replay, warm_up
from vllm_omni.entrypoints.bench.requests import MediaOutput
from vllm_omni.entrypoints.bench.workload import Arrival, Workload, rate_of
from vllm_omni.errors import OmniError

NOW = [Arrival(0.0, "Hi.")]


def endpoint(server: MediaServer, backend: str, name: str = "A", timeout_s: float = 30.0, **body: Any) -> Endpoint:
    return Endpoint(name, server.url, "tiny", backend, body, {"X-Test": "1"}, timeout_s)


def run(
    endpoints: Sequence[Endpoint],
    arrivals: Sequence[Arrival],
    bounds: Mapping[str, float] | None = None,
    num_repeats: int = 1,
    told: list[str] | None = None,
) -> Point:
    told = [] if told is None else told

    async def send() -> Point:
        async with open_session() as session:
            workload = Workload(rate_of(arrivals), arrivals)
            return await measure(endpoints, workload, num_repeats, bounds or {}, session, told.append)

    return asyncio.run(send())


def test_a_chat_with_speech_is_measured_by_its_text_and_its_sound(media_server: MediaServer) -> None:
    arrivals = [Arrival(0.0, "Hi."), Arrival(0.01, "Who are you?", 7, {"seed": 3})]
    point = run([endpoint(media_server, "omni-chat", seed=1)], arrivals, {"ttft": 1e5, "gap": 1e5})
    figures = point.runs[0].figures
    assert (figures["media_completed"], figures["media_failed"], figures["media_goodput_share"]) == (2, 0, 1.0)
    assert 0 < figures["p50_ttft_ms"] <= figures["p50_ttfa_ms"] <= figures["p50_e2el_ms"]
    assert figures["p50_rtf"] == pytest.approx(figures["p50_e2el_ms"] / 1000 / (NUM_PIECES * PIECE_S))
    assert figures["c100"] == 1.0
    bodies = media_server.bodies
    assert [body["messages"][0]["content"] for body in bodies] == ["Hi.", "Who are you?"]
    assert [(body.get("max_tokens"), body["ignore_eos"], body["seed"]) for body in bodies] == [
        (None, False, 1),
        (7, True, 3),
    ]
    assert all(one["X-Test"] == "1" for one in media_server.headers)


def test_speech_is_measured_by_its_sound(media_server: MediaServer) -> None:
    figures = run([endpoint(media_server, "omni-speech", voice="alto")], NOW * 3).runs[0].figures
    assert figures["media_completed"] == 3 and "p50_ttft_ms" not in figures and figures["p99_rtf"] > 0
    assert figures["audio_seconds_per_second"] > 0 and figures["c50"] <= figures["c100"] <= 1.0
    assert {body["voice"] for body in media_server.bodies} == {"alto"}
    assert {body["response_format"] for body in media_server.bodies} == {"wav"}


def test_images_are_counted_by_the_second(media_server: MediaServer) -> None:
    point = run([endpoint(media_server, "omni-images")], [Arrival(0.0, "A cat.", None, {"n": 2})] * 2)
    figures = point.runs[0].figures
    assert figures["images_per_second"] > 0 and "p50_ttfa_ms" not in figures
    seconds = 4 / figures["images_per_second"]
    assert seconds >= figures["p50_e2el_ms"] / 1000 > 0


def test_videos_are_awaited_as_jobs(media_server: MediaServer) -> None:
    figures = run([endpoint(media_server, "omni-videos")], NOW * 2).runs[0].figures
    assert figures["media_completed"] == 2 and figures["videos_per_second"] > 0
    assert media_server.deleted == []


def test_a_video_that_is_awaited_no_longer_is_deleted(media_server: MediaServer) -> None:
    media_server.ends_videos = False
    (of_a,) = run([endpoint(media_server, "omni-videos", timeout_s=0.2)], NOW).runs
    assert of_a.errors == {"no end within 0.2 s": 1}
    assert media_server.deleted == ["video_1"]


def test_requests_are_sent_though_earlier_ones_are_not_answered(media_server: MediaServer) -> None:
    """The server answers none of the eight before all have arrived: a client that waited would wait for ever."""
    media_server.num_awaited = 8
    arrivals = [Arrival(index * 0.005, f"Cat {index}.") for index in range(8)]

    async def send() -> list[MediaOutput]:
        async with open_session() as session:
            return await replay(endpoint(media_server, "omni-images"), arrivals, session)

    started = time.perf_counter()
    outputs = asyncio.run(send())
    assert [one.success for one in outputs] == [True] * 8
    waited = [one.start_time - started for one in outputs]  # not since the first one, which may be late
    assert all(at >= 0.9 * arrival.at_s for at, arrival in zip(waited, arrivals, strict=True))  # none is early
    assert {body["prompt"] for body in media_server.bodies} == {one.prompt for one in arrivals}


def test_requests_that_fail_are_not_good_and_say_why(media_server: MediaServer) -> None:
    media_server.fails = {1, 2}
    (of_a,) = run([endpoint(media_server, "omni-images")], NOW * 4, {"e2el": 1e5}).runs
    assert of_a.figures["media_failed"] == 2 and of_a.figures["media_goodput_share"] == 0.5
    ((error, number),) = of_a.errors.items()
    assert number == 2 and error.startswith("HTTP 429: ") and "too many requests" in error


def test_a_run_without_an_answer_has_no_goodput(media_server: MediaServer) -> None:
    media_server.fails = {0, 1}
    figures = run([endpoint(media_server, "omni-images")], NOW * 2, {"e2el": 1e5}).runs[0].figures
    assert dict(figures) == {"media_completed": 0, "media_failed": 2, "media_goodput": 0.0, "media_goodput_share": 0.0}


def test_two_servers_are_measured_in_turn(media_server: MediaServer, other_server: MediaServer) -> None:
    told: list[str] = []
    both = [endpoint(media_server, "omni-images"), endpoint(other_server, "omni-images", "B")]
    point = run(both, [Arrival(0.0, "A cat."), Arrival(0.02, "A dog.")], num_repeats=2, told=told)
    assert [one.server for one in point.runs] == ["A", "B", "A", "A", "B", "A"]
    assert told[1] == "50 requests/s, run 2 of 6: B"
    assert (len(media_server.requests), len(other_server.requests)) == (4 * 2, 2 * 2)


def test_a_server_that_fails_more_requests_is_worse(media_server: MediaServer, other_server: MediaServer) -> None:
    other_server.fails = {1, 3, 5}
    both = [endpoint(media_server, "omni-images"), endpoint(other_server, "omni-images", "B")]
    point = run(both, NOW * 2, {"e2el": 1e5}, num_repeats=3)
    found = {one.name: one for one in point.comparisons()}
    assert found["media_failed"].verdict == "outside: B is worse"
    assert (found["media_goodput_share"].ratio, found["media_goodput_share"].verdict) == (0.5, "outside: B is worse")


def test_a_first_request_that_fails_says_where_and_why(media_server: MediaServer) -> None:
    media_server.fails = {0}

    async def send() -> None:
        async with open_session() as session:
            await warm_up(endpoint(media_server, "omni-images"), NOW[0], session)

    with pytest.raises(OmniError, match=r"/v1/images/generations: the first request failed: HTTP 429: .*too many"):
        asyncio.run(send())
    asyncio.run(send())


def test_a_client_that_is_stopped_leaves_no_video_behind(media_server: MediaServer) -> None:
    media_server.ends_videos = False

    async def stop() -> None:
        async with open_session() as session:
            load = asyncio.create_task(replay(endpoint(media_server, "omni-videos"), NOW, session))
            await asyncio.to_thread(wait_for, lambda: media_server.num_polls > 0)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load

    asyncio.run(stop())
    assert media_server.deleted == ["video_1"]
