"""Bodies of requests to a diffusion pipeline, without an engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from PIL import Image

from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages, Values
from vllm_omni.entrypoints.openai.diffusion_protocol import ImageRequest
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.graph_media import GraphMediaServing
from vllm_omni.entrypoints.openai.images import usage_of
from vllm_omni.entrypoints.openai.video_protocol import VideoJobRequest
from vllm_omni.errors import DeadlineExceeded, InvalidRequest


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/")
    async def answer(values: Values) -> dict[str, Any]:
        return values

    return app


async def post(app: FastAPI, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post("/", **body)


async def test_a_body_that_cannot_be_read_is_rejected(app: FastAPI) -> None:
    for body, message in [
        ({"content": b"[" * 100_000}, "nested too deeply"),
        ({"content": b"{"}, "the body is not valid JSON"),
        ({"content": b"[]"}, "the body must be an object"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, "'text/plain': must be application/json"),
    ]:
        response = await post(app, **body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


async def test_fields_of_an_object_in_a_form_have_its_name(app: FastAPI) -> None:
    form = {"a": "1", "b[]": ["2", "3"], "c[x]": "4", "c[y]": "5", "d": "6"}
    assert (await post(app, data=form)).json() == {"a": "1", "b": ["2", "3"], "c": {"x": "4", "y": "5"}, "d": "6"}


def test_usage_counts_squares_of_pixels() -> None:
    made = [Image.new("RGB", (64, 64)), Image.new("RGB", (17, 16))]
    usage = usage_of(InputImages(sizes=[(16, 32)]), made)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 18, 20)
    assert usage["input_tokens_details"] == {"image_tokens": 2, "text_tokens": 0}


# -- the request to the engine ----------------------------------------------------------------------------------------


class Models:
    base_model_paths = ()

    async def check_model(self, name: str | None) -> None:
        return None


class SlowPrompt(DiffusionServing):
    async def _engine_prompt(self, prompt: str, media: Mapping[str, Any]) -> Any:
        await asyncio.sleep(60)


def make_serving(cls: type[DiffusionServing]) -> DiffusionServing:
    def generate(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise InvalidRequest("height = 0", param="height")  # as parameters are rejected, before there is a generator

    serving = cls.__new__(cls)
    serving._omni = SimpleNamespace(  # type: ignore[assignment]
        check_admission=lambda: None, generate=generate, graph_of=lambda name: name, draws=False
    )
    serving._models, serving._image_metrics, serving.modality = Models(), None, "image"  # type: ignore[assignment]
    serving._omni.orchestrator = SimpleNamespace()  # type: ignore[assignment]
    return serving


def make_request(**headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": named})


async def test_a_rejected_parameter_has_the_name_of_its_field() -> None:
    fields = ImageRequest(prompt="a cat", size="64x0")
    with pytest.raises(InvalidRequest, match="size: height = 0") as rejected:
        await make_serving(DiffusionServing).answer("a cat", fields, InputImages(), make_request())
    assert rejected.value.param == "size"


async def test_a_deadline_bounds_the_reading_of_the_prompt() -> None:
    fields = ImageRequest(prompt="a cat", deadline_s=0.01)
    with pytest.raises(DeadlineExceeded, match="during the reading of the prompt"):
        await make_serving(SlowPrompt).answer("a cat", fields, InputImages(), make_request())


def serve_images_of(role: str) -> GraphMediaServing:
    """Images that a role makes: ``painter`` is a diffusion stage, ``writer`` another one, ``crop`` a function."""
    stages = {"writer": SimpleNamespace(is_diffusion=False), "painter": SimpleNamespace(is_diffusion=True)}
    serving: Any = make_serving(GraphMediaServing)
    serving.pipeline = SimpleNamespace(modalities={"image": "picture"})
    plan = SimpleNamespace(name="drawn", outputs={"picture": object()})
    serving._omni.orchestrator.plan_of = lambda name: plan
    serving._omni.orchestrator.stage_of = lambda output, graph: role
    serving._omni.config = SimpleNamespace(stage_names=tuple(stages), stage=stages.__getitem__)
    made: GraphMediaServing = serving
    return made


def test_settings_of_an_image_go_to_the_diffusion_stage_that_makes_it() -> None:
    params = serve_images_of("painter")._stage_params(ImageRequest(prompt="a cat", size="64x32"))
    assert params["painter"].items() >= {"num_outputs_per_prompt": 1, "width": 64, "height": 32}.items()


@pytest.mark.parametrize("role", ["writer", "crop"])
@pytest.mark.parametrize(
    ("given", "name"), [({"size": "64x32"}, "width"), ({"n": 2}, "num_outputs_per_prompt"), ({"seed": 0}, "seed")]
)
def test_settings_of_an_image_that_nothing_reads_are_rejected(role: str, given: Any, name: str) -> None:
    serving = serve_images_of(role)
    assert serving._stage_params(ImageRequest(prompt="a cat")) is None
    with pytest.raises(InvalidRequest, match=f"{name} = .* has no effect: '{role}' makes the image, and is no") as said:
        serving._stage_params(ImageRequest(prompt="a cat", **given))
    assert said.value.param == name


def test_what_only_a_job_wishes_has_no_effect_where_nothing_reads_it() -> None:
    serving = serve_images_of("crop")
    assert serving._stage_params(VideoJobRequest(prompt="a cat")) is None
    assert serve_images_of("painter")._stage_params(VideoJobRequest(prompt="a cat"))["painter"]["progress"]


def test_an_image_of_a_graph_is_made_in_the_session_of_its_header() -> None:
    serving = make_serving(GraphMediaServing)
    arguments = serving._arguments(ImageRequest(prompt="a cat"), make_request(x_session_id="s"))
    assert arguments["session_id"] == "s"
