"""``vllm serve DIR --omni`` of a diffusion pipeline: one real process, asked by the real ``openai`` client."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image

from tests import machine
from tests.documents import ROOT, read_blocks
from tests.media.test_image import decode
from tests.server import Server, run_example, wait_for
from tests.shared_engines import IMAGE_SERVER, SharedEngines

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning"),
]

STEPS = 4
SMALL = {"prompt": "a red cat", "size": "64x48", "seed": 7, "num_inference_steps": STEPS}
LONG = {**SMALL, "num_inference_steps": 900}


@pytest.fixture
def server(engines: SharedEngines) -> Server:
    return engines.get(IMAGE_SERVER)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def alone(shared_engines: SharedEngines) -> list[torch.Tensor]:
    """The pixels [H, W, 3] that diffusers makes of ``SMALL`` with its seed and with the next."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(
        shared_engines.directory(IMAGE_SERVER) / "checkpoint", torch_dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    images = []
    for seed in (7, 8):
        generator = torch.Generator().manual_seed(seed)
        made = pipeline("a red cat", height=48, width=64, num_inference_steps=STEPS, generator=generator)
        images.append(torch.frombuffer(bytearray(made.images[0].tobytes()), dtype=torch.uint8).view(48, 64, 3))
    return images


def post(server: Server, path: str = "/v1/images/generations", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def pixels_of(b64_json: str) -> torch.Tensor:
    return decode(base64.b64decode(b64_json))


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Checks that each event is named as its data is."""
    name = ""
    for line in filter(None, response.iter_lines()):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
            continue
        event = json.loads(line.removeprefix("data: "))
        assert event["type"] == name
        yield event


def is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """A level apart: what is half a level apart may be rounded up here and down there."""
    return ours.shape == theirs.shape and (ours.int() - theirs.int()).abs().max() <= 1


# -- /v1/images/generations --------------------------------------------------------------------------------------------


def test_images_are_those_that_diffusers_makes_with_the_seed_and_the_next(
    client: openai.OpenAI, alone: list[torch.Tensor]
) -> None:
    answer = client.images.generate(
        model="tiny",
        prompt="a red cat",
        n=2,
        size="64x48",  # type: ignore[arg-type]  # OpenAI's own are larger
        extra_body={"seed": 7, "num_inference_steps": STEPS},
    )
    assert answer.data is not None
    assert (answer.size, answer.output_format) == ("64x48", "png")
    images = [pixels_of(one.b64_json or "") for one in answer.data]
    assert [is_close(ours, theirs) for ours, theirs in zip(images, alone, strict=True)] == [True, True]


def test_a_seed_makes_the_answer_repeatable(server: Server) -> None:
    assert post(server, **SMALL).json()["data"] == post(server, **SMALL).json()["data"]


def test_without_a_seed_two_answers_differ(server: Server) -> None:
    body = {name: value for name, value in SMALL.items() if name != "seed"}
    assert post(server, **body).json()["data"] != post(server, **body).json()["data"]


@pytest.mark.parametrize(("name", "kind"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_formats(server: Server, name: str, kind: str) -> None:
    answer = post(server, **SMALL, output_format=name, output_compression=90).json()
    with Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as image:
        assert (image.format, image.size) == (kind, (64, 48))


def test_what_steers_the_pipeline_reaches_it(server: Server) -> None:
    """Each of these changes the image."""
    changes: list[dict[str, Any]] = [
        {},
        {"num_inference_steps": 3},
        {"negative_prompt": "grey", "true_cfg_scale": 3.0},
        {"negative_prompt": "grey", "true_cfg_scale": 1.5},
        {"extra_params": {"sigmas": [1.0, 0.6, 0.4, 0.1]}},
    ]
    images = {post(server, **{**SMALL, **change}).json()["data"][0]["b64_json"] for change in changes}
    assert len(images) == len(changes)


def test_fields_of_openai_without_a_meaning_here_are_taken(server: Server) -> None:
    more = {"quality": "high", "style": "vivid", "background": "auto", "moderation": "low", "user": "me"}
    assert post(server, **SMALL, **more, response_format="b64_json").status_code == 200


BAD_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "valid string"),
    ({"size": "0x64"}, "size", "width = 0: must be at least 1 pixel"),
    ({"size": "-64x64"}, "size", "width = -64"),
    ({"size": "big"}, "size", "must be 'auto' or WIDTHxHEIGHT"),
    (
        {"size": "16384x16384"},
        "size",
        "at most 4194304 pixels here (to allow more, raise max_pixels of",
    ),
    ({"prompt": "fox " * 500_000}, "prompt", "at most 2048 prompt tokens here"),
    ({"num_inference_steps": 0}, "num_inference_steps", "must be at least 1"),
    ({"num_inference_steps": 1001}, "num_inference_steps", "at most 1000 steps here"),
    ({"num_inference_steps": 1.5}, "num_inference_steps", "valid integer"),
    ({"n": 0}, "n", "must be at least 1"),
    ({"n": 5}, "n", "at most 4 outputs here"),
    ({"guidance_scale": -1}, "guidance_scale", "at least 0"),
    ({"seed": 2**64}, "seed", "valid: "),
    ({"output_format": "jpg"}, "output_format", "did you mean 'jpeg'"),
    ({"output_compression": 101}, "output_compression", "less than or equal to 100"),
    ({"response_format": "file"}, "response_format", "b64_json"),
    ({"background": "transparent"}, "background", "opaque"),
    ({"partial_images": 2}, "partial_images", "only in a stream"),
    ({"negative_promt": "x"}, "negative_promt", "did you mean 'negative_prompt'"),
    ({"extra_params": {"foo": 1}}, "extra_params", "takes no extra argument 'foo'"),
    ({"extra_params": {"latents": [1]}}, "extra_params", "which no request can carry; others: sigmas"),
    ({"extra_params": {"prompt_embeds": [1.0]}}, "extra_params", "which no request can carry"),
    ({"extra_params": {"max_sequence_length": "x"}}, "extra_params", "must be a whole number"),
    ({"extra_params": {"sigmas": [1.0] * 100_000}}, "extra_params", "at most 1000 steps here"),
    ({"extra_params": {"generator": 1}}, "extra_params", "seed"),
    ({"image": "x"}, "image", "/v1/images/edits"),
]


def test_images_are_answered_by_url_as_openais_client_asks_for_them(server: Server) -> None:
    size = {"size": "64x48", "extra_body": {"num_inference_steps": STEPS, "seed": 1}}
    by_url = server.client.images.generate(model="tiny", prompt="a cat", response_format="url", **size)  # type: ignore[call-overload]
    whole = server.client.images.generate(model="tiny", prompt="a cat", **size)  # type: ignore[call-overload]
    assert by_url.data[0].b64_json is None and by_url.data[0].url.startswith(f"{server.url}/v1/files/")
    assert httpx.get(by_url.data[0].url, timeout=60).content == base64.b64decode(whole.data[0].b64_json)


def test_a_bad_field_is_rejected_by_name(server: Server) -> None:
    for change, param, reason in BAD_FIELDS:
        response = post(server, **{**SMALL, **change})
        assert response.status_code == 400, change
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, 400), change
        assert reason in error["message"], change


def test_a_bad_request_is_rejected_before_its_stream_starts(server: Server) -> None:
    response = post(server, **{**SMALL, "num_inference_steps": 0, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "num_inference_steps")


def test_a_body_that_is_not_an_object_is_rejected(server: Server) -> None:
    cases = [
        (b"{", "not valid JSON"),
        (b"[]", "must be an object"),
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
    ]
    for body, reason in cases:
        response = httpx.post(server.url + "/v1/images/generations", content=body, timeout=60)
        assert response.status_code == 400, body
        assert reason in response.json()["error"]["message"], body


def test_a_missing_prompt_is_named(server: Server) -> None:
    assert post(server, size="64x48").json()["error"]["message"] == "prompt: is missing"


def test_another_models_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served: valid: tiny"):
        client.images.generate(model="other", prompt="a cat")


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_partial_images_and_then_the_image(client: openai.OpenAI, server: Server) -> None:
    """As OpenAI's client reads it."""
    stream = client.images.generate(
        model="tiny",
        prompt="a red cat",
        size="64x48",  # type: ignore[call-overload]  # as above
        stream=True,
        partial_images=1,
        extra_body={"seed": 7, "num_inference_steps": STEPS},
    )
    partial, completed = list(stream)
    assert (partial.type, partial.partial_image_index) == ("image_generation.partial_image", 0)
    assert (completed.type, completed.size) == ("image_generation.completed", "64x48")
    assert completed.b64_json == post(server, **SMALL).json()["data"][0]["b64_json"]
    assert pixels_of(partial.b64_json).shape == (48, 64, 3)
    assert partial.b64_json != completed.b64_json


def test_each_image_of_a_stream_is_completed(server: Server) -> None:
    events = list(events_of(post(server, **SMALL, n=2, stream=True)))
    assert [event["type"] for event in events] == ["image_generation.completed"] * 2
    assert [event["b64_json"] for event in events] == [
        one["b64_json"] for one in post(server, **SMALL, n=2).json()["data"]
    ]


def test_progress_counts_up_to_the_number_of_steps(server: Server) -> None:
    """A slow reader sees some steps together, and never one twice."""
    *progress, completed = events_of(post(server, **SMALL, stream=True, progress=True))
    assert completed["type"] == "image_generation.completed"
    steps = [event["step"] for event in progress]
    assert steps
    assert steps == sorted(set(steps))
    assert {event["num_steps"] for event in progress} == {STEPS}
    assert 1 <= steps[0] <= steps[-1] <= STEPS


# -- clients that leave ------------------------------------------------------------------------------------------------


def num_running(server: Server) -> float:
    return server.metric(r"vllm:num_requests_running\{.*\}")


def test_a_client_that_leaves_a_stream_ends_the_request(server: Server) -> None:
    body = {**LONG, "stream": True, "progress": True}
    with httpx.stream("POST", server.url + "/v1/images/generations", json=body, timeout=60) as response:
        events = events_of(response)  # kept: its end would close the connection
        event = next(events)
        wait_for("the request among those that run", lambda: num_running(server) == 1)
    assert event["step"] < 900
    wait_for("the end of the request", lambda: num_running(server) == 0 and server.holds_nothing())


def test_a_client_that_leaves_before_the_answer_ends_the_request(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/images/generations", json=LONG, timeout=1)
    wait_for("the end of the request", lambda: num_running(server) == 0 and server.holds_nothing())


# -- the other routes --------------------------------------------------------------------------------------------------


def test_chat_answers_with_the_image(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "You draw."},
            {"role": "user", "content": "a dog"},
            {"role": "assistant", "content": "(a dog)"},
            {"role": "user", "content": [{"type": "text", "text": "a red cat"}]},
        ],
        seed=7,
        temperature=0.5,
        extra_body={"size": "64x48", "num_inference_steps": STEPS},
    )
    (part,) = answer.choices[0].message.content  # type: ignore[misc, union-attr]  # a list, which OpenAI's type has not
    head, _, data = part["image_url"]["url"].partition(",")  # type: ignore[index]
    assert head == "data:image/png;base64"
    assert data == post(server, **SMALL).json()["data"][0]["b64_json"]


def test_chat_streams_the_image_in_one_piece(server: Server) -> None:
    body = {name: value for name, value in SMALL.items() if name != "prompt"}
    messages = [{"role": "user", "content": "a red cat"}]
    response = post(server, "/v1/chat/completions", **body, messages=messages, stream=True)
    *chunks, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert done == "[DONE]"
    first, last = map(json.loads, chunks)
    assert first["choices"][0]["delta"]["content"][0]["type"] == "image_url"
    assert (first["modality"], last["choices"][0]["finish_reason"]) == ("image", "stop")


BAD_FIELDS_OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "nowhere"}]}]}, "messages"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"format": "mp3"}}, "audio"),
    ({"modalities": ["text"]}, "modalities"),
    ({"num_inference_stesp": 3}, "num_inference_stesp"),
    ({"height": 0, "size": "auto"}, "height"),
]


def test_a_bad_field_of_a_chat_is_rejected_by_name(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a cat"}], "num_inference_steps": 1, "size": "64x48"}
    for change, param in BAD_FIELDS_OF_CHATS:
        response = post(server, "/v1/chat/completions", **{**body, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), change


@pytest.mark.parametrize("path", ["/v1/videos/sync", "/v1/audio/generate"])
def test_a_modality_that_the_pipeline_lacks_is_rejected(server: Server, path: str) -> None:
    response = post(server, path, prompt="a cat", input="a cat")
    assert response.status_code == 400
    assert "output of this model is image" in response.json()["error"]["message"]
    assert "/v1/images/generations" in response.json()["error"]["message"]


def test_an_image_for_a_pipeline_without_input_images_is_rejected(server: Server) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    response = httpx.post(
        server.url + "/v1/images/edits", data={"prompt": "a cat"}, files={"image": file.getvalue()}, timeout=60
    )
    assert response.status_code == 400
    assert "takes no input image, got 1" in response.json()["error"]["message"]


def test_routes_of_text_do_not_exist(server: Server) -> None:
    paths = ("/v1/completions", "/tokenize", "/v1/audio/speech", "/invocations")
    assert {path: post(server, path, prompt="a").status_code for path in paths} == dict.fromkeys(paths, 404)


def test_models_health_and_metrics(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", None)
    assert server.get("/health").json()["stages"]["diffusion"]["state"] == "running"
    assert "vllm_omni:num_open_calls" in server.get("/metrics").text
    bodies = server.get("/openapi.json").json()["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    assert set(bodies) == {"application/json", "multipart/form-data"}


def test_the_example_of_a_client(server: Server, tmp_path: Path) -> None:
    more = ["--size=64x48", f"--steps={STEPS}", "--output", tmp_path / "cat.png"]
    written = [Path(line) for line in run_example("images_client.py", server, *more)]
    assert [path.name for path in written] == ["cat-0.png", "cat-1.png", "cat.png"]
    assert {decode(path.read_bytes()).shape for path in written} == {(48, 64, 3)}


def test_the_requests_of_the_guide(server: Server, tmp_path: Path) -> None:
    """As they stand but for the server's address."""
    machine.require("curl")
    blocks = read_blocks(ROOT / "docs" / "diffusion.md")
    (curl,) = [command for block in blocks for command in block.commands if command[0] == "curl"]
    (program,) = [block.text for block in blocks if block.is_program and "OpenAI" in block.text]
    answers = []
    for command in (curl, [sys.executable, "-c", program]):
        words = [word.replace("http://127.0.0.1:8000", server.url) for word in command]
        answers.append(subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=120).stdout)
    image = base64.b64decode(json.loads(answers[0])["data"][0]["b64_json"])
    written = [decode((tmp_path / f"cat-{index}.png").read_bytes()) for index in range(2)]
    assert [one.shape for one in written] == [(64, 64, 3)] * 2
    assert is_close(written[0], decode(image))  # a batch of two has other sums
