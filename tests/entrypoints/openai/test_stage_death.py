"""What clients see while stages that are stuck or killed restart. The last file that uses the shared server."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from tests.entrypoints.openai.test_server import image_part, png
from tests.processes import few_file_descriptors
from tests.server import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    Server,
    ask,
    engine_core,
    read_audio,
    wait_for,
)

IDLE_S = 2.0  # how long connections without requests use all file descriptors


def kill(server: Server, stage: str) -> None:
    engine_core(server, stage).kill()


def states(server: Server) -> dict[str, str]:
    return {name: stage["state"] for name, stage in server.get("/health").json()["stages"].items()}


def test_requests_wait_while_idle_connections_use_all_file_descriptors(client: openai.OpenAI, server: Server) -> None:
    """The stages that end in the tests below are restarted all the same."""
    process = psutil.Process(server.process.pid)
    address = httpx.URL(server.url)
    with few_file_descriptors(process.pid, 5), ThreadPoolExecutor() as threads:
        with contextlib.ExitStack() as idle:
            for _ in range(10):
                idle.enter_context(socket.create_connection((address.host, address.port)))
            for stage in ("thinker", "talker", "token2wav"):
                said = f"stage {stage}: cannot be watched: [Errno 24]"
                wait_for(said, lambda said=said: said in server.log.read_text())  # type: ignore[misc]
            used = process.cpu_times()
            health = threads.submit(server.get, "/health")
            time.sleep(IDLE_S)
            now = process.cpu_times()
            assert now.user + now.system - used.user - used.system < IDLE_S / 4
            assert not health.done()
        assert health.result().status_code == 200
    wait_for("no reason", lambda: not any(one["reason"] for one in server.get("/health").json()["stages"].values()))
    assert {one["num_restarts"] for one in server.get("/health").json()["stages"].values()} == {0}
    answer = ask(client, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"})
    read_audio(answer.choices[0].message.audio.data)


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


@pytest.mark.long
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
