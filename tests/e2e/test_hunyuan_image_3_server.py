"""HunyuanImage-3 over HTTP: pictures by OpenAI's routes and in chats."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.server import Server, serve
from vllm_omni.testing.hunyuan_image_3 import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # the engines' own: tests/e2e/test_hunyuan_image_3.py

SIZE = (80, 48)
STEPS = {"num_inference_steps": 3, "seed": 1}
IMAGE = {"width": SIZE[0], "height": SIZE[1], **STEPS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("hunyuan_image_3")
    with serve(build(directory / "checkpoint"), directory / "log", "--max-num-batched-tokens=256") as server:
        yield server


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))


def chat(server: Server, content: Any, **body: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    answer = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0.0, extra_body=body
    )
    return answer.choices[0].message


def test_a_picture_is_the_same_by_every_route(server: Server) -> None:
    client: Any = server.client  # it knows no steps and seeds
    size = f"{SIZE[0]}x{SIZE[1]}"
    (made,) = client.images.generate(model="tiny", prompt="a small red boat", size=size, extra_body=STEPS).data
    assert opened(made.b64_json).size == SIZE
    (image,) = chat(server, "a small red boat", modalities=["image"], image=IMAGE).images
    assert opened(image["image_url"]["url"]).tobytes() == opened(made.b64_json).tobytes()


def test_the_model_chooses_the_size(server: Server) -> None:
    (image,) = chat(server, "a small red boat", modalities=["image"], image=STEPS).images
    assert all(side % 16 == 0 for side in opened(image["image_url"]["url"]).size)


def test_a_text_comes_before_its_picture(server: Server) -> None:
    given = {"image": IMAGE, "chat_template_kwargs": {"task": "recaption"}}
    message = chat(server, "the lake", modalities=["text", "image"], **given)
    assert message.content and opened(message.images[0]["image_url"]["url"]).size == SIZE
    assert chat(server, "the lake", modalities=["text"], chat_template_kwargs={"task": "recaption"}).content


def test_an_image_of_a_chat_is_read_and_edited(server: Server) -> None:
    (picture,) = chat(server, "a boat", modalities=["image"], image=IMAGE).images
    parts = [{"type": "image_url", "image_url": picture["image_url"]}, {"type": "text", "text": "paint it"}]
    (edited,) = chat(server, parts, modalities=["image"], image=IMAGE).images
    client: Any = server.client
    by_route = client.images.edit(
        model="tiny",
        prompt="paint it",
        image=("a.png", base64.b64decode(picture["image_url"]["url"].partition(",")[2])),
        size=f"{SIZE[0]}x{SIZE[1]}",
        extra_body=STEPS,
    )
    assert opened(by_route.data[0].b64_json).tobytes() == opened(edited["image_url"]["url"]).tobytes()
    assert edited["image_url"]["url"] != picture["image_url"]["url"]


def test_a_stream_has_progress_and_partial_images(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a boat", "size": "80x48", "stream": True, "partial_images": 1, "progress": True}
    answer = server.post("/v1/images/generations", {**body, **STEPS})
    names = [line.removeprefix("event: image_generation.") for line in answer.text.splitlines() if "event:" in line]
    assert names == ["progress", "partial_image", "progress", "completed"]


def test_a_size_that_pictures_do_not_have_is_rejected_with_the_nearest(server: Server) -> None:
    answer = server.post("/v1/images/generations", {"model": "tiny", "prompt": "a boat", "size": "63x48"})
    assert answer.status_code == 400, answer.text
    assert "the nearest size of this model is" in answer.json()["error"]["message"]
