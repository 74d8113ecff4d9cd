"""What clients see while stages that are stuck or killed restart. The last file that uses the shared server."""

import openai
import pytest

from tests.entrypoints.openai.test_server import image_part, png
from tests.server import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    Server,
    ask,
    engine_core,
    read_audio,
    wait_for,
)


def kill(server: Server, stage: str) -> None:
    engine_core(server, stage).kill()


def states(server: Server) -> dict[str, str]:
    return {name: stage["state"] for name, stage in server.get("/health").json()["stages"].items()}


def test_a_stuck_vocoder_fails_speech_alone_and_restarts(client: openai.OpenAI, server: Server, text: str) -> None:
    engine_core(server, "token2wav").suspend()
    with pytest.raises(openai.InternalServerError, match="'token2wav': its engine made no step for 10 s") as error:
        ask(client, modalities=["text", "audio"])
    assert error.value.status_code == 500
    response = server.get("/health")
    assert response.status_code == 503
    message = "stage 'token2wav': restarting: its engine made no step for 10 s, with requests"
    assert response.json()["error"]["message"] == message
    assert states(server) == {"thinker": "running", "talker": "running", "token2wav": "restarting"}
    assert server.metric(r'vllm_omni:stage_up\{stage="token2wav"\}') == 0
    with pytest.raises(openai.InternalServerError) as error:  # the client's name for all from 500
        ask(client, modalities=["text", "audio"])
    assert error.value.status_code == 503
    assert message in str(error.value)
    assert ask(client).choices[0].message.content == text
    wait_for("the stage runs again", lambda: server.get("/health").status_code == 200, START_TIMEOUT_S)
    assert server.metric(r'vllm_omni:stage_restarts_total\{stage="token2wav"\}') == 1
    answer = ask(client, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"})
    read_audio(answer.choices[0].message.audio.data)
    assert server.holds_nothing()


def test_a_killed_first_stage_restarts_and_stops_the_server_the_second_time(
    client: openai.OpenAI, server: Server, text: str
) -> None:
    """The last test of the server."""
    picture = [image_part(png()), {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": picture}]
    seen = ask(client, messages=messages).choices[0].message.content
    kill(server, "thinker")
    wait_for("/health reports it", lambda: server.get("/health").status_code == 503)
    killed = "killed by SIGKILL (by the system if memory ran out: see dmesg)"
    message = f"stage 'thinker': restarting: its engine has died: {killed}"
    assert server.get("/health").json()["error"]["message"] == message
    with pytest.raises(openai.InternalServerError) as error:
        ask(client)
    assert error.value.status_code == 503
    wait_for("the stage runs again", lambda: server.get("/health").status_code == 200, START_TIMEOUT_S)
    assert ask(client).choices[0].message.content == text
    # The front end had cached the picture, and does not send what it believes the engine to have.
    assert ask(client, messages=messages).choices[0].message.content == seen
    kill(server, "thinker")
    assert server.process.wait(END_TIMEOUT_S) == 1
