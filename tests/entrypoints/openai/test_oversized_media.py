"""What a running server answers to media and bodies beyond its limits, and what they cost it."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.entrypoints.openai.test_server import audio_part, data_url, image_part, with_part
from tests.media import oversized
from tests.server import Server, ask

MB = 1 << 20
FILM = data_url("video/mp4", oversized.film_that_says(2**30))
PARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "picture": (image_part(oversized.png_that_says(20_000, 20_000)), "image_url", "400000000 pixels"),
    "icon": (image_part(oversized.icon(16, 2000)), "image_url", "it is none of AVIF"),
    "long sound": (audio_part(oversized.wav(601_000, 1000)), "audio_url", "VLLM_MAX_AUDIO_DECODE_DURATION_S"),
    "sound of a rate": (audio_part(oversized.wav(9, 2_000_000_000)), "audio_url", "1,000 to 768,000 are read"),
    "session": (audio_part(oversized.PLAYLISTS["sdp"]), "audio_url", "a format that is not read"),
    "film": ({"type": "video_url", "video_url": {"url": FILM}}, "video_url", "VLLM_OMNI_MAX_VIDEO_FRAMES"),
}


def peak_of(server: Server) -> int:
    """Most bytes that the front end has had resident."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_media_beyond_the_limits_are_rejected_before_they_cost_memory(
    client: openai.OpenAI, server: Server, text: str
) -> None:
    before = peak_of(server)
    for name, (part, param, why) in PARTS.items():
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, messages=with_part(part))
        body = error.value.body
        assert isinstance(body, dict)
        assert why in body["message"], name
        assert body["param"] == param, (name, body)
        assert server.holds_nothing(), name
    assert peak_of(server) - before < 200 * MB  # the picture alone would take 1,200 MB when decoded
    assert ask(client).choices[0].message.content == text


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages", "/tokenize", "/v1/chat/completions/batch"])
def test_every_route_that_reads_messages_has_the_limits(server: Server, route: str) -> None:
    picture = oversized.icon(16, 600)
    url = data_url("image/png", picture)
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if route == "/v1/messages":
        data = url.partition(",")[2]
        part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [part]}]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": messages}
    if route == "/v1/responses":
        messages[0]["content"] = [{"type": "input_image", "image_url": url, "detail": "auto"}]
        body = {"model": "tiny", "max_output_tokens": 5, "input": messages}
    if route == "/tokenize":
        del body["max_tokens"]
    if route == "/v1/chat/completions/batch":
        body["messages"] = [messages]
    response = server.post(route, body)
    assert response.status_code == 400, response.text
    assert "cannot identify image file: it is none of AVIF" in json.dumps(response.json())


def test_a_body_that_is_too_large_is_answered_before_it_is_sent(server: Server, text: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for route in ("/v1/chat/completions", "/v1/audio/speech", "/v1/completions"):
        head = f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {129 * MB}\r\n\r\n{{".encode())
            answer = b""
            while b"VLLM_OMNI_MAX_BODY_BYTES" not in answer:
                piece = connection.recv(4096)
                assert piece, answer
                answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert ask(server.client).choices[0].message.content == text
