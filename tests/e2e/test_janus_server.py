"""Janus-Pro over HTTP, compiled as by default: pictures by OpenAI's routes and in chats, texts as transformers'."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.test_janus import Case, Reference
from tests.entrypoints.openai.test_server import png
from tests.reference.media import make_image
from tests.server import Server, serve
from vllm_omni.testing.janus import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # the engines' own: tests/e2e/test_janus.py

SIDE = 64
GIVEN = {"guidance_scale": 5.0, "seed": 1}
TEXT = "a small red boat"
PNG = base64.b64encode(png(61, 50)).decode()  # of make_image(61, 50)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("janus") / "checkpoint")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with serve(checkpoint, checkpoint.parent / "log", "--max-model-len=1024", "--dtype=float32") as server:
        yield server


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))


def generate(server: Server, **fields: Any) -> Any:
    return server.client.images.generate(
        model="tiny", prompt=TEXT, **{"size": f"{SIDE}x{SIDE}", "extra_body": GIVEN} | fields
    )


def chat(server: Server, content: Any, **body: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    answer = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, extra_body={"temperature": 0.0, **body}
    )
    return answer.choices[0].message


def assert_alike(picture: str, other: str | Image.Image) -> None:
    """The same but for the order of sums, which depends on what else is in a batch."""
    expected = opened(other) if isinstance(other, str) else other
    differences = zip(opened(picture).tobytes(), expected.tobytes(), strict=True)
    assert max(abs(one - other) for one, other in differences) <= 1


def test_a_picture_is_the_same_by_every_route(server: Server) -> None:
    first, second = generate(server, n=2).data
    assert opened(first.b64_json).size == (SIDE, SIDE)
    assert first.b64_json != second.b64_json, "the second has another seed"
    assert_alike(generate(server).data[0].b64_json, first.b64_json)
    assert_alike(generate(server, extra_body={**GIVEN, "seed": 2}).data[0].b64_json, second.b64_json)
    message = chat(server, TEXT, modalities=["image"], image=GIVEN, temperature=1.0)
    (image,) = message.images
    assert_alike(image["image_url"]["url"], first.b64_json)


def test_texts_and_greedy_pictures_are_transformers(server: Server, checkpoint: Path) -> None:
    reference = Reference(checkpoint)
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "what is it?"},
    ]
    decode = reference.processor.tokenizer.decode
    for content, case in (
        ("hello there", Case("hello there")),
        (parts, Case("<image_placeholder>\nwhat is it?", (make_image(61, 50),))),
    ):
        assert chat(server, content).content == decode(reference.answer(case), skip_special_tokens=True)
    (picture,) = chat(server, TEXT, modalities=["image"], image={"guidance_scale": 5.0}).images
    expected = Image.fromarray(reference.image(reference.answer(Case(TEXT, scale=5.0))).numpy())
    assert_alike(picture["image_url"]["url"], expected)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("images/generations", {"prompt": TEXT, "size": "48x48"}, "the pictures of this model have 64 by 64 pixels"),
        ("images/generations", {"prompt": TEXT, "num_inference_steps": 3}, "num_inference_steps = 3 has no effect"),
        ("images/generations", {"prompt": TEXT, "negative_prompt": "cat"}, "negative_prompt = 'cat' has no effect"),
        ("images/edits", {"prompt": TEXT, "image": PNG}, "give no images"),
    ],
)
def test_what_cannot_be_generated_is_rejected(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    answer = server.post(f"/v1/{path}", {"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
