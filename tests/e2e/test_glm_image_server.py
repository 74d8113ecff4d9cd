"""GLM-Image by every entrance, with each stage in a process of its own."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.reference.media import make_image
from tests.server import Server, serve
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.testing.glm_image import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # the engines' own: tests/e2e/test_glm_image.py

SIZE = (96, 64)
PROMPT = "a small red boat"
STEPS = {"num_inference_steps": 3, "seed": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("glm") / "checkpoint")


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    with serve(path, path.parent / "log", "--max-model-len=512", "--enforce-eager") as server:
        yield server


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))


def generate(server: Server, **fields: Any) -> Any:
    """OpenAI's client, which knows no steps and seeds."""
    return server.client.images.generate(
        model="tiny", prompt=PROMPT, **{"size": f"{SIZE[0]}x{SIZE[1]}", "extra_body": STEPS} | fields
    )


def test_a_picture_is_the_same_by_every_route(server: Server) -> None:
    (image,) = generate(server).data
    assert opened(image.b64_json).size == SIZE
    size = {"width": SIZE[0], "height": SIZE[1], **STEPS}
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **size}).json()
    (part,) = answer["choices"][0]["message"]["content"]
    assert opened(part["image_url"]["url"]).tobytes() == opened(image.b64_json).tobytes()


def test_an_edit_has_the_size_of_its_image(server: Server) -> None:
    file = io.BytesIO()
    make_image(64, 128).save(file, "png")
    edited = server.client.images.edit(model="tiny", prompt="paint it", image=file.getvalue(), extra_body=STEPS)
    assert opened(edited.data[0].b64_json).size == (64, 128)


def test_a_stream_has_progress_and_partial_images(server: Server) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "size": "64x64", "stream": True, "partial_images": 1, "progress": True}
    answer = server.post("/v1/images/generations", {**body, **STEPS})
    names = [line.removeprefix("event: image_generation.") for line in answer.text.splitlines() if "event:" in line]
    # What a client does not read in time is merged: the later progress and the later picture stand.
    assert names[-1] == "completed"
    assert set(names) == {"progress", "partial_image", "completed"}
    assert names.count("partial_image") == names.count("completed") == 1
    assert names.count("progress") <= STEPS["num_inference_steps"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "100x64"}, "size"),
        ({"negative_prompt": "blurred"}, "negative_prompt"),
        ({"prompt": "<|image|>"}, "prompt"),
        ({"size": "1024x1024"}, "size"),
    ],
)
def test_what_cannot_be_answered_is_rejected(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/images/generations", {"prompt": PROMPT, "size": "64x64", **STEPS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_command_and_the_class_make_the_same_picture(path: Path) -> None:
    file = path.parent / "picture.png"
    common = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    flags = ["--dtype=float32", "--max-model-len=512", "--enforce-eager"]
    asked = ["--prompt", PROMPT, "--size", "96x64", "--steps", "3", "--seed", "1", "-o", str(file)]
    main(["generate", str(path), *asked, *flags])
    with OmniLLM(path, **common) as omni:
        params = DiffusionParams(width=SIZE[0], height=SIZE[1], num_inference_steps=3, seed=1)
        (output,) = omni.generate(PROMPT, params, use_tqdm=False)
    assert output.images[0].tobytes() == Image.open(file).tobytes()
    assert set(output.stage_durations) == {"language_model", "diffusion", "total"}
