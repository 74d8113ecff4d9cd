"""What a front end asks of the engines' process reaches it, comes back as it was, and leaves nothing."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.entrypoints.front_ends.link_ends import Engines, connected, make_output
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.entrypoints.front_ends.messages import (
    WINDOW,
    Measure,
    Status,
    Stop,
    decode_for_front_end,
    decode_output,
    encode_message,
    encode_output,
    make_payloads,
)
from vllm_omni.entrypoints.voice_cloning import ClonedVoice, VoiceFeatures
from vllm_omni.errors import InvalidRequest, OmniError, Overloaded, ShuttingDown, StageFailed, StageUnavailable
from vllm_omni.messages.slo import SloReport
from vllm_omni.process.status import StageState, StageStatus

GREEDY = {"thinker": SamplingParams(temperature=0.0)}


async def wait_for(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 - of sockets
            await asyncio.sleep(0.001)


def test_an_output_comes_back_from_its_bytes_as_it_was() -> None:
    payloads = make_payloads()
    output = make_output("one", 7, audio=torch.arange(3.0), sample_rate=24000, codec_ids=[1, 2], text="beside")
    output.stage_durations, output.latency_parts = {"total": 1.5}, {"thinker": {"prefill": 0.5}}
    output.slo_reports = {"thinker": SloReport(True, True, False, 0.25, 3, 1)}
    message: Any = decode_for_front_end(encode_output(4, output, payloads))
    back = decode_output(message, payloads)
    assert message.call == 4
    assert (back.request_id, back.prompt_token_ids, back.finished) == ("one", [1, 2], False)
    assert [(one.text, list(one.token_ids)) for one in back.outputs] == [("<7>", [7])]
    assert torch.equal(back.multimodal_output.pop("audio"), torch.arange(3.0))
    assert back.multimodal_output == {"sample_rate": 24000, "codec_ids": [1, 2], "text": "beside"}
    assert (back.stage_durations, back.latency_parts) == (output.stage_durations, output.latency_parts)
    assert back.slo_reports == output.slo_reports


async def test_a_request_reaches_the_engines_and_its_outputs_the_front_end_in_order() -> None:
    engines = Engines(num_outputs=5 * WINDOW)
    voice = ClonedVoice(VoiceFeatures(b"\1\2", b"\3", 1), "a text")
    prompt = {"prompt_token_ids": [1], "samples": np.arange(3)}
    async with connected(engines) as ends:
        arguments = {"modalities": ["text"], "options": {"cloned_voice": voice}}
        outputs = [one async for one in ends.link.generate(prompt, GREEDY, "one", arguments)]
        assert [one.outputs[0].token_ids for one in outputs] == [[index] for index in range(5 * WINDOW)]
        assert all(one.request_id == "one" for one in outputs)
        ((given, params, arguments),) = engines.requests
        assert np.array_equal(given["samples"], prompt["samples"])
        assert params["thinker"].temperature == 0.0
        assert arguments["options"]["cloned_voice"] == voice
        assert ends.calls.num_open == 0


async def test_a_slow_reader_holds_its_request_back() -> None:
    engines = Engines(num_outputs=10 * WINDOW)
    async with connected(engines) as ends, aclosing(ends.link.generate({}, GREEDY, "one", {})) as outputs:
        await anext(outputs)
        for _ in range(50):
            await asyncio.sleep(0)
        assert engines.made == WINDOW + 1


async def test_a_reader_that_leaves_early_waits_until_the_request_is_released() -> None:
    engines = Engines(num_outputs=10 * WINDOW)
    async with connected(engines) as ends:
        async with aclosing(ends.link.generate({}, GREEDY, "one", {})) as outputs:
            await anext(outputs)
        assert engines.released == ["one"]
        assert ends.calls.num_open == 0


async def test_a_request_that_is_left_before_it_starts_is_over_as_well() -> None:
    async with connected(Engines()) as ends:
        task = asyncio.ensure_future(anext(ends.link.generate({}, GREEDY, "one", {})))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_for(lambda: ends.calls.num_open == 0)


async def test_abort_ends_a_request_by_its_id() -> None:
    engines = Engines(num_outputs=10 * WINDOW)
    async with connected(engines) as ends:
        outputs = ends.link.generate({}, GREEDY, "one", {})
        await anext(outputs)
        await ends.link.abort("another")
        assert engines.released == []
        await ends.link.abort("one")
        assert engines.released == ["one"]
        assert len([one async for one in outputs]) <= WINDOW


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("temperature: no", param="temperature"),
        Overloaded("too many", retry_after_s=17),
        StageUnavailable("talker", "restarting"),
        StageFailed("thinker", "it died"),
        ShuttingDown("the server is shutting down"),
    ],
)
async def test_an_error_is_the_same_in_the_front_end(error: OmniError) -> None:
    async with connected(Engines(error=error)) as ends:
        with pytest.raises(type(error)) as raised:
            _ = [one async for one in ends.link.generate({}, GREEDY, "one", {})]
        assert str(raised.value) == str(error)
        assert vars(raised.value) == vars(error)


async def test_errors_of_vllm_are_the_requests_and_others_the_servers() -> None:
    async with connected(Engines(error=VLLMValidationError("no", parameter="stop"))) as ends:
        with pytest.raises(InvalidRequest, match="no") as raised:
            _ = [one async for one in ends.link.generate({}, GREEDY, "one", {})]
        assert raised.value.param == "stop"
        ends.engines.error = ZeroDivisionError("x")
        with pytest.raises(OmniError, match="the server failed: ZeroDivisionError"):
            _ = [one async for one in ends.link.generate({}, GREEDY, "two", {})]


async def test_a_prompt_that_cannot_travel_is_an_error_of_its_request_alone() -> None:
    async with connected(Engines()) as ends:
        with pytest.raises(OmniError, match="cannot be sent to the engines: a object cannot travel"):
            await anext(ends.link.generate({"prompt": object()}, GREEDY, "one", {}))
        assert len([one async for one in ends.link.generate({}, GREEDY, "two", {})]) == 3


async def test_an_answer_that_cannot_travel_is_an_error_of_its_request_alone() -> None:
    class Odd(Engines):
        async def generate(self, prompt: Any, params: Any, request_id: str, /, **arguments: Any) -> Any:
            yield make_output(request_id, 1, odd=object())

    async with connected(Odd()) as ends:
        with pytest.raises(OmniError, match="cannot be sent to the front end: a object cannot travel"):
            await anext(ends.link.generate({}, GREEDY, "one", {}))


async def test_the_media_of_a_prompt_are_released_once_it_was_sent() -> None:
    budget = MediaBudget(100, 1)
    async with connected(Engines()) as ends:
        with budget.hold() as holding:
            await budget.reserve(holding, 60)
            outputs = ends.link.generate({}, GREEDY, "one", {})
            await anext(outputs)
            assert budget.num_held_bytes == 0
            await outputs.aclose()


async def test_a_front_end_that_is_lost_has_its_requests_aborted() -> None:
    engines = Engines(num_outputs=10 * WINDOW)
    async with connected(engines) as ends:
        outputs = ends.link.generate({}, GREEDY, "one", {})
        await anext(outputs)
        await ends.calls.aclose()
        assert engines.released == ["one"]
        await outputs.aclose()


async def test_a_front_end_without_engines_fails_its_requests_at_once() -> None:
    async with connected(Engines(num_outputs=10 * WINDOW)) as ends:
        outputs = ends.link.generate({}, GREEDY, "one", {})
        await anext(outputs)
        ends.channel.close()
        with pytest.raises(ShuttingDown, match="has ended"):
            while True:
                await anext(outputs)
        with pytest.raises(ShuttingDown, match="has ended"):
            await anext(ends.link.generate({}, GREEDY, "two", {}))


async def test_the_end_of_a_front_end_fails_what_it_still_reads() -> None:
    engines = Engines(num_outputs=10 * WINDOW)
    async with connected(engines) as ends:
        outputs = ends.link.generate({}, GREEDY, "one", {})
        await anext(outputs)
        ends.link.fail_all(ShuttingDown("over"))
        with pytest.raises(ShuttingDown, match="over"):
            await anext(outputs)
        assert engines.released == ["one"]


async def test_http_requests_about_the_server_are_answered_there() -> None:
    async with connected(Engines()) as ends:
        answered = await ends.link.forward("POST", "/drain?x=1", [("a", "b")], b"{}")
        assert (answered.status, answered.headers, answered.body) == (
            207,
            [("x-url", "/drain?x=1"), ("a", "b")],
            b"POST{}",
        )


async def test_adapters_are_loaded_there() -> None:
    adapter = LoRARequest("name", 3, "/a/path")
    async with connected(Engines()) as ends:
        await ends.link.add_adapter(adapter)
        assert ends.engines.adapters == [adapter]
        ends.engines.error = StageFailed("thinker", "it has no adapters")
        with pytest.raises(StageFailed, match="no adapters"):
            await ends.link.add_adapter(adapter)


async def test_keys_take_turns_across_front_ends() -> None:
    engines = Engines()
    async with connected(engines) as one, connected(engines) as other:
        async with one.link.turn("greedy") as first, one.link.turn("greedy") as second, other.link.turn("rare") as rare:
            assert (first, second, rare) == (0, 1, 0)
            async with other.link.turn("greedy") as third:
                assert third == 2
        await wait_for(lambda: one.calls.num_open + other.calls.num_open == 0)
        async with other.link.turn("rare") as later:
            assert later == 3


async def test_jobs_of_all_front_ends_have_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_MAX_VIDEO_JOBS", "1")
    engines = Engines()
    async with connected(engines) as one, connected(engines) as other:
        async with one.link.take_place():
            with pytest.raises(Overloaded, match="VLLM_OMNI_MAX_VIDEO_JOBS") as raised:
                await other.link.take_place().__aenter__()
            assert raised.value.retry_after_s == 10
        async with other.link.take_place():
            pass


async def test_a_lost_front_end_ends_its_turns() -> None:
    engines = Engines()
    async with connected(engines) as other:
        async with connected(engines) as one:
            turn = one.link.turn("greedy")
            assert await turn.__aenter__() == 0
            await one.calls.aclose()
            await turn.__aexit__(None, None, None)
        async with other.link.turn("rare") as priority:
            assert priority == 1  # behind the one that has ended


async def test_each_end_reports_to_the_other() -> None:
    status = Status(0, {"talker": StageStatus(StageState.RESTARTING, "it died", 2)}, {"thinker": (3, 5)})
    async with connected(Engines()) as ends:
        for message in (status, Measure(0), Stop(0)):
            ends.channel.send(encode_message(message))
        ends.link.note_read(0.5)
        ends.link.note_rejected("talker")
        ends.link.report_ready("why not")
        await wait_for(lambda: ends.held and ends.is_ready and ends.num_stops)
        assert ends.statuses == [status]
        assert (ends.held[0].received_bytes, ends.held[0].media_bytes) == (3, 4)
        assert (ends.engines.seconds, ends.engines.rejected) == ([0.5], ["talker"])
        assert ends.is_ready[0].error == "why not"
