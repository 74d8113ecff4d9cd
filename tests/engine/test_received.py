"""Bytes are counted as they arrive, for each request and for all, and given back."""

import asyncio
from contextlib import ExitStack

import pytest

from vllm_omni.engine.graph_metrics import _media_metrics
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.received import ReceivedBytes
from vllm_omni.errors import InvalidRequest, Overloaded, RequestTooLarge


def test_a_body_has_at_most_its_limit() -> None:
    received = ReceivedBytes(1000, 100, 200)
    share = received.body()
    with share.held():
        share.add(60)
        share.add(40)
        with pytest.raises(RequestTooLarge) as error:
            share.add(1)
        said = "the body of the request has 101 bytes or more: at most 100 (VLLM_OMNI_MAX_BODY_BYTES)"
        assert str(error.value) == said
        assert received.num_held_bytes == 100
    assert received.num_held_bytes == 0


def test_the_files_of_a_prompt_have_a_limit_of_their_own() -> None:
    share = ReceivedBytes(1000, 100, 200).files()
    share.add(200)
    with pytest.raises(
        InvalidRequest, match=r"files that the prompt names have 201 .*\(VLLM_OMNI_MAX_FETCHED_BYTES"
    ) as error:
        share.add(1)
    assert not isinstance(error.value, RequestTooLarge)


def test_a_request_that_there_would_never_be_room_for_is_too_large() -> None:
    with pytest.raises(RequestTooLarge, match=r"at most 50 \(VLLM_OMNI_MAX_RECEIVED_BYTES\)"):
        ReceivedBytes(50, 100, 100).body().add(51)


def test_requests_together_have_at_most_the_limit_of_all_and_may_try_again() -> None:
    received = ReceivedBytes(150, 100, 100)
    body, files = received.body(), received.files()
    body.add(100)
    files.add(50)
    with pytest.raises(Overloaded, match="holds 150 bytes of requests and their files, and 1 more") as error:
        files.add(1)
    assert error.value.retry_after_s > 0
    body.release()
    files.add(1)
    assert received.num_held_bytes == 51


def test_what_is_known_beforehand_is_checked_without_holding_it() -> None:
    received = ReceivedBytes(1000, 100, 100)
    received.body().check(100)
    with pytest.raises(RequestTooLarge):
        received.body().check(101)
    assert received.num_held_bytes == 0


def test_a_share_that_a_job_holds_is_given_back_at_its_end() -> None:
    received = ReceivedBytes(1000, 100, 100)
    share = received.body()
    with ExitStack() as job:
        with share.held():
            share.add(10)
            job.enter_context(share.held())
        assert received.num_held_bytes == 10
    assert received.num_held_bytes == 0
    share.take_back(5)
    assert received.num_held_bytes == 0


def test_nothing_is_added_to_a_request_that_has_ended() -> None:
    received = ReceivedBytes(1000, 100, 100)
    share = received.files()
    share.release()
    with pytest.raises(asyncio.CancelledError):
        share.add(1)
    assert received.num_held_bytes == 0


def test_the_files_of_a_prompt_are_given_back_once_it_has_been_read() -> None:
    budget = MediaBudget(100, 1, ReceivedBytes(1000, 100, 100))
    with budget.hold() as holding:
        holding.files.add(70)
        holding.release()
        assert budget.received.num_held_bytes == 0
        holding.release()
    assert budget.received.num_held_bytes == 0


def test_metrics_say_what_is_held() -> None:
    budget = MediaBudget(100, 1, ReceivedBytes(1000, 100, 100))
    with budget.hold() as holding:
        holding.files.add(70)
        asyncio.run(budget.reserve(holding, 30))
        found = {metric.name: metric.samples[0].value for metric in _media_metrics(budget)}
    assert found == {"vllm_omni:received_bytes": 70, "vllm_omni:media_bytes": 30}
