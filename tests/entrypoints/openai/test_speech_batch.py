"""``/v1/audio/speech/batch`` over HTTP, on the server of ``conftest.py``."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.entrypoints.openai.test_speech import NUM_SAMPLES, SAY, say
from tests.media.test_audio import decode
from tests.server import NUM_CODES, Server

SHARED = {name: value for name, value in SAY.items() if name != "input"} | {"response_format": "wav"}
WAVEFORM = 1e-4  # of the maximum: sums of floats are taken in another order in a batch of another size
STEP = 1 / 32768  # files have 16 bits a sample: values that hardly differ may be rounded to neighbours


def say_all(server: Server, *items: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/audio/speech/batch", json={**SHARED, "items": items, **more}, timeout=60)


def tolerance(sound: np.ndarray[Any, Any]) -> float:
    return WAVEFORM * float(abs(sound).max()) + STEP


def test_each_item_has_the_file_of_a_request_of_its_own(server: Server) -> None:
    items = [{"input": "One."}, {"input": "Two.", "voice": "Ethan", "response_format": "flac"}, {"input": "One."}]
    sounds = []
    answer = say_all(server, *items).json()
    assert (answer["total"], answer["succeeded"], answer["failed"]) == (3, 3, 0)
    assert [result["media_type"] for result in answer["results"]] == ["audio/wav", "audio/flac", "audio/wav"]
    for index, (item, result) in enumerate(zip(items, answer["results"], strict=True)):
        assert (result["index"], result["status"], result["error"]) == (index, "success", None)
        name = item.get("response_format", "wav")
        sounds.append(decode(name, base64.b64decode(result["audio_data"])))
        alone = decode(name, say(server, **SHARED | item).content)
        assert sounds[-1].shape == (NUM_SAMPLES,)
        np.testing.assert_allclose(sounds[-1], alone, atol=tolerance(alone), rtol=0)
        usage = result["usage"]
        assert usage["output_tokens"] == NUM_CODES
        assert usage["total_tokens"] == usage["input_tokens"] + NUM_CODES
    assert abs(sounds[0] - sounds[1]).max() > 10 * tolerance(sounds[0]), "swapped items would not be noticed"


def test_an_error_ends_the_item_that_has_it(server: Server) -> None:
    wrong = [{"input": " "}, {"input": "x", "voice": "nobody"}, {"inptu": "x"}, {"input": "x", "sped": 2}]
    wrong += [{"input": "x", "stream_format": "sse"}, {"input": "x", "model": "tiny"}]
    answer = say_all(server, *wrong, {"input": "x"}).json()
    assert (answer["total"], answer["succeeded"], answer["failed"]) == (7, 1, 6)
    said = [result["error"]["message"] for result in answer["results"][:-1]]
    valid = (
        "is empty",
        "unknown speaker 'nobody'",
        "input: is missing",
        "did you mean 'speed'",
        "a batch is",
        "beside",
    )
    assert all(part in message for part, message in zip(valid, said, strict=True)), said
    assert all(result["audio_data"] is None for result in answer["results"][:-1])
    assert answer["results"][-1]["status"] == "success"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"items": []}, 400, "items"),
        ({"items": [{"input": "x"}] * 129}, 400, "items"),
        ({"items": ["x"]}, 400, "items.0"),
        ({}, 400, "items: is missing"),
        ({"items": [{"input": "x"}], "vioce": "x"}, 400, "unknown field 'vioce': did you mean 'voice'"),
        ({"items": [{"input": "x"}], "input": "y"}, 400, "unknown field 'input'"),
        ({"items": [{"input": "x"}], "model": "other"}, 404, "other"),
    ],
)
def test_a_body_that_is_wrong_as_a_whole_is_rejected(server: Server, body: Any, status: int, message: str) -> None:
    response = httpx.post(server.url + "/v1/audio/speech/batch", json=body, timeout=60)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
