"""BAGEL over HTTP, in the dtype of the checkpoint: pictures by OpenAI's routes and in chats."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.entrypoints.openai.test_server import png
from tests.server import Server, serve
from vllm_omni.testing.bagel import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # the engines' own: tests/e2e/test_bagel.py

SIZE = (64, 48)
STEPS = {"num_inference_steps": 3, "seed": 1}
IMAGE = {"width": SIZE[0], "height": SIZE[1], **STEPS}
QUESTION = [{"role": "user", "content": "a small red boat"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("bagel")
    with serve(build(directory / "checkpoint"), directory / "log", "--max-num-batched-tokens=256") as server:
        yield server


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))


def generate(server: Server, **fields: Any) -> Any:
    """OpenAI's client, which knows no steps and seeds."""
    size = f"{SIZE[0]}x{SIZE[1]}"
    return server.client.images.generate(
        model="tiny", prompt="a small red boat", **{"size": size, "extra_body": STEPS} | fields
    )


def chat(server: Server, content: Any, **body: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    answer = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0.0, extra_body=body
    )
    return answer.choices[0].message


def test_a_picture_is_the_same_by_every_route(server: Server) -> None:
    first, second = generate(server, n=2).data
    assert opened(first.b64_json).size == SIZE
    assert first.b64_json != second.b64_json, "the second has another seed"
    assert generate(server, extra_body={**STEPS, "seed": 2}).data[0].b64_json == second.b64_json
    message = chat(server, "a small red boat", modalities=["image"], image=IMAGE)
    assert message.content is None
    (image,) = message.images
    assert opened(image["image_url"]["url"]).tobytes() == opened(first.b64_json).tobytes()
    (event,) = server.client.images.generate(
        model="tiny", prompt="a small red boat", size="64x48", stream=True, extra_body=STEPS
    )
    assert event.type == "image_generation.completed" and event.b64_json == first.b64_json


def test_a_stream_has_progress_and_partial_images(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a boat", "size": "64x48", "stream": True, "partial_images": 1, "progress": True}
    answer = server.post("/v1/images/generations", {**body, **STEPS})
    names = [line.removeprefix("event: image_generation.") for line in answer.text.splitlines() if "event:" in line]
    assert names == ["progress", "partial_image", "progress", "completed"]


def stream(server: Server, content: str, **body: Any) -> list[tuple[str, str]]:
    """The pieces of a streamed answer in order: texts, joined up to the next picture, and URLs of pictures."""
    pieces: list[tuple[str, str]] = []
    for chunk in server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=6,
        temperature=0.0,
        stream=True,
        extra_body=body,
    ):
        for choice in chunk.choices:
            if text := choice.delta.content:
                before = pieces.pop()[1] if pieces and pieces[-1][0] == "text" else ""
                pieces.append(("text", before + text))
            pieces += [("image", one["image_url"]["url"]) for one in getattr(choice.delta, "images", None) or []]
    return pieces


def pieces_of(message: Any) -> list[tuple[str, str]]:
    """Those of a whole answer, by the offsets of its pictures."""
    pieces, start = [], 0
    for image in message.images:
        end = image.get("text_offset", len(message.content))
        pieces += [("text", message.content[start:end])] * (end > start) + [("image", image["image_url"]["url"])]
        start = end
    return pieces


def test_a_text_comes_before_its_picture_streamed_or_not(server: Server) -> None:
    wanted = {"modalities": ["text", "image"], "image": IMAGE}
    whole = pieces_of(chat(server, "think, then draw", **wanted))
    assert stream(server, "think, then draw", **wanted) == whole
    assert [kind for kind, _ in whole] == ["text", "image"]


def test_texts_and_pictures_alternate_streamed_or_not(server: Server) -> None:
    wanted = {"modalities": ["text", "image"], "image": {**IMAGE, "num_outputs_per_prompt": 3}}
    whole = pieces_of(chat(server, "think, then draw", **wanted))
    assert stream(server, "think, then draw", **wanted) == whole
    assert [kind for kind, _ in whole] == ["text", "image"] * 3
    assert len(set(whole)) > 4, "a later picture has another seed, and a later text reads the pictures before it"
    first = chat(server, "think, then draw", modalities=["text", "image"], image=IMAGE)
    assert whole[:2] == pieces_of(first)


def test_a_picture_goes_back_into_the_conversation(server: Server) -> None:
    (picture,) = chat(server, "a boat", modalities=["image"], image=IMAGE).images
    parts = [{"type": "image_url", "image_url": picture["image_url"]}, {"type": "text", "text": "what is it?"}]
    seen, not_seen = chat(server, parts).content, chat(server, "what is it?").content
    assert seen and seen != not_seen
    (edited,) = chat(server, parts, modalities=["image"], image=STEPS).images
    assert opened(edited["image_url"]["url"]).size == SIZE
    by_route = server.client.images.edit(
        model="tiny",
        prompt="what is it?",
        image=("a.png", base64.b64decode(picture["image_url"]["url"].partition(",")[2])),
        extra_body=STEPS,
    )
    assert opened(by_route.data[0].b64_json).tobytes() == opened(edited["image_url"]["url"]).tobytes()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("images/generations", {"prompt": "a boat", "size": "63x48"}, "must be a multiple of 16 up to 128"),
        ("images/generations", {"prompt": "a boat", "size": "1x1"}, "the nearest is 16"),
        ("images/generations", {"prompt": "a boat", "num_inference_steps": 0}, "must be from 1 to 1000"),
        ("images/generations", {"prompt": "a boat", "true_cfg_scale": 2.0}, "true_cfg_scale = 2.0 has no effect"),
        ("images/generations", {"prompt": "a boat", "n": 65}, "must be from 1 to 64"),
        (
            "images/generations",
            {"prompt": "a boat", "extra_params": {"guidance_renorm": "globel"}},
            "did you mean 'global'",
        ),
        ("images/edits", {"prompt": "a boat", "image": "AAAA"}, "image: the image cannot be read"),
        ("chat/completions", {"messages": QUESTION, "image": {}}, "image: the answer has no picture"),
        (
            "chat/completions",
            {"messages": QUESTION, "modalities": ["image"], "image": {"widht": 3}},
            "image.widht: did you mean 'width'",
        ),
        (
            "chat/completions",
            {
                "messages": QUESTION,
                "modalities": ["text", "image"],
                "image": {"num_outputs_per_prompt": 2, "output_type": "latents"},
            },
            "the text behind a picture reads it",
        ),
        ("chat/completions", {"messages": QUESTION, "mm_processor_kwargs": {"is_drawn": True}}, "disabled by default"),
    ],
)
def test_what_cannot_be_generated_is_rejected_with_what_would_be(
    server: Server, path: str, body: dict[str, Any], said: str
) -> None:
    answer = server.post(f"/v1/{path}", {"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_an_image_of_one_pixel_is_read(server: Server) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(1, 1)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > len("what is it?") / 4
