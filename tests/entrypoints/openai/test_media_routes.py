"""Edited images, videos and sounds over HTTP: the application itself, on a real engine of each kind."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import soundfile
import torch

from tests.media import oversized
from tests.media.test_image import decode as decode_image
from tests.media.test_image import make_pixels
from tests.media.test_video import decode as decode_video
from tests.server import silent_host
from tests.shared_engines import STABLE_AUDIO, SharedEngines, on_the_loop_of
from vllm_omni import AsyncOmni, OmniLLM
from vllm_omni.diffusion.loading import load_diffusers_pipeline
from vllm_omni.engine.media_budget import Holding
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.media.image import IMAGE_FORMATS, encode_image, to_image
from vllm_omni.testing import diffusion as tiny

PICTURE = encode_image(to_image(make_pixels()), IMAGE_FORMATS["png"])
OTHER = encode_image(to_image(255 - make_pixels()), IMAGE_FORMATS["png"])


def url_of(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


class Asked(NamedTuple):
    """A tiny pipeline's engine, and a client of its server."""

    omni: AsyncOmni
    client: httpx.AsyncClient


@asynccontextmanager
async def started(path: Path, name: str, *flags: str) -> AsyncIterator[Asked]:
    parsed = parse_serve_args([str(tiny.build(path, name)), "--served-model-name=tiny", *flags])
    omni = await asyncio.to_thread(lambda: AsyncOmni(config=parsed.load_config()))
    try:
        transport = httpx.ASGITransport(await build_omni_app(omni, parsed.args))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            yield Asked(omni, client)
    finally:
        await omni.aclose()


@asynccontextmanager
async def asked(path: Path, name: str, *flags: str) -> AsyncIterator[httpx.AsyncClient]:
    """The client alone."""
    async with started(path, name, *flags) as one:
        yield one.client


# -- /v1/images/edits --------------------------------------------------------------------------------------------------

EDIT = {"prompt": "at night", "size": "64x64", "seed": "3", "num_inference_steps": "2"}  # a form has texts alone


@pytest.fixture(scope="module")
def edit_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edit") / "tiny"


@pytest.fixture(scope="module")
async def editing(edit_path: Path) -> AsyncIterator[Asked]:
    async with started(edit_path, "qwen-image-edit-plus") as one:
        yield one


@pytest.fixture(scope="module")
def editor(editing: Asked) -> httpx.AsyncClient:
    return editing.client


async def edit(client: httpx.AsyncClient, *pictures: bytes, name: str = "image", **more: str) -> str:
    """The image in base 64."""
    files = [(name, ("picture.png", picture, "image/png")) for picture in pictures]
    response = await client.post("/v1/images/edits", data={**EDIT, **more}, files=files)
    assert response.status_code == 200, response.text
    (image,) = response.json()["data"]
    return str(image["b64_json"])


async def test_an_edit_reads_its_image(editor: httpx.AsyncClient) -> None:
    first, second = await edit(editor, PICTURE), await edit(editor, OTHER)
    assert decode_image(base64.b64decode(first)).shape == (64, 64, 3)
    assert first != second
    assert first == await edit(editor, PICTURE)


async def test_an_edit_is_the_one_that_diffusers_makes(editing: Asked, edit_path: Path) -> None:
    picture = to_image(make_pixels())
    prompt = {"prompt": "at night", "negative_prompt": "blurred", "multi_modal_data": {"image": picture}}
    params = {"height": 64, "width": 64, "num_inference_steps": 2, "true_cfg_scale": 3.0}
    ours = [one async for one in editing.omni.generate(prompt, {**params, "seed": 3, "output_type": "float"})]
    pipeline = load_diffusers_pipeline(str(edit_path))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        theirs = pipeline(
            image=picture, prompt="at night", negative_prompt="blurred", generator=generator, output_type="pt", **params
        ).images
    assert (ours[-1].multimodal_output["images"] - theirs.permute(0, 2, 3, 1)).abs().max() < 1e-5


async def test_several_images_are_read_in_order(editor: httpx.AsyncClient) -> None:
    """Under the name with brackets that OpenAI's clients give to lists."""
    both = await edit(editor, PICTURE, OTHER, name="image[]")
    assert both == await edit(editor, PICTURE, OTHER)
    assert len({both, await edit(editor, OTHER, PICTURE), await edit(editor, PICTURE)}) == 3


async def test_an_image_may_be_a_url_in_json(editor: httpx.AsyncClient) -> None:
    expected = await edit(editor, PICTURE)
    for given in ({"image": url_of(PICTURE)}, {"images": [{"image_url": url_of(PICTURE)}]}, {"url": url_of(PICTURE)}):
        response = await editor.post("/v1/images/edits", json={**EDIT, **given})
        assert response.json()["data"][0]["b64_json"] == expected


async def test_an_edit_is_streamed_under_its_own_name(editor: httpx.AsyncClient) -> None:
    files = {"image": PICTURE}
    response = await editor.post("/v1/images/edits", data={**EDIT, "stream": "true"}, files=files)
    assert response.text.startswith("event: image_edit.completed\n")


def check_late(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (504, "GatewayTimeoutError")
    assert error["message"] == "deadline_s = 0.3 has passed during the reading of the input images"


async def test_the_reading_of_images_ends_at_the_deadline(editor: httpx.AsyncClient) -> None:
    with silent_host() as host:
        part = {"type": "image_url", "image_url": {"url": host}}
        chat = {"messages": [{"role": "user", "content": [part]}]}
        for path, body in (("/v1/images/edits", {**EDIT, "image": host}), ("/v1/chat/completions", chat)):
            check_late(await editor.post(path, json={**body, "deadline_s": 0.3}))


async def test_chat_reads_the_images_of_its_last_message(editor: httpx.AsyncClient) -> None:
    content = [{"type": "image_url", "image_url": {"url": url_of(PICTURE)}}, {"type": "text", "text": "at night"}]
    body = {"messages": [{"role": "user", "content": content}], "size": "64x64", "seed": 3, "num_inference_steps": 2}
    body["store"] = False  # of OpenAI's API, without effect
    answer = (await editor.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 16  # 64x64 pixels
    url = answer["choices"][0]["message"]["content"][0]["image_url"]["url"]
    assert url.partition(",")[2] == await edit(editor, PICTURE)


async def test_edited_images_are_answered_by_url(editor: httpx.AsyncClient) -> None:
    expected = await edit(editor, PICTURE)
    form = {**EDIT, "response_format": "url", "n": "2"}
    answer = (await editor.post("/v1/images/edits", data=form, files={"image": PICTURE})).json()
    first, second = [one["url"] for one in answer["data"]]
    assert first.startswith("http://server/v1/files/file-") and f"expires={answer['expires_at']}&" in first
    fetched = await editor.get(first)
    assert fetched.headers["content-type"] == "image/png"
    # Two images may be computed in one batch, in which sums are rounded otherwise.
    pixels, alone = (decode_image(one).int() for one in (fetched.content, base64.b64decode(expected)))
    assert (pixels - alone).abs().max() <= 8
    assert (await editor.get(second)).content != fetched.content
    assert [set(one) for one in answer["data"]] == [{"url"}, {"url"}]


async def test_no_stream_answers_by_url(editor: httpx.AsyncClient) -> None:
    form = {**EDIT, "response_format": "url", "stream": "true"}
    response = await editor.post("/v1/images/edits", data=form, files={"image": PICTURE})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


BAD_EDITS: list[tuple[dict[str, bytes], dict[str, str], str, str]] = [
    ({}, {}, "image", "at least one image is needed"),
    ({"image": b"no image"}, {}, "image", "the image cannot be read"),
    ({"image": oversized.png_that_says(20_000, 20_000)}, {}, "image", "400000000 pixels"),
    ({"image": oversized.icon(16, 300)}, {}, "image", "it is none of AVIF"),
    ({"image": PICTURE, "mask": PICTURE}, {}, "mask", "not supported"),
    ({"image": PICTURE}, {"size": "64"}, "size", "must be 'auto' or WIDTHxHEIGHT"),
    ({"image": PICTURE}, {"n": "two"}, "n", "valid integer"),
    ({"image": PICTURE}, {"num_inference_steps": "0"}, "num_inference_steps", "must be at least 1"),
    ({"image": PICTURE}, {"priority": str(2**63)}, "priority", "must be an int from -2**63 to 2**63 - 1"),
    ({"image": PICTURE}, {"extra_params": "{"}, "extra_params", "must be an object in JSON"),
    ({"image": PICTURE}, {"promt": "x"}, "promt", "did you mean 'prompt'"),
]


async def test_a_bad_field_of_an_edit_is_rejected_by_name(editor: httpx.AsyncClient) -> None:
    for files, more, param, reason in BAD_EDITS:
        response = await editor.post("/v1/images/edits", data={**EDIT, **more}, files=files)
        assert response.status_code == 400, (more, reason)
        error = response.json()["error"]
        assert error["param"] == param, (more, reason)
        assert reason in error["message"], more


async def test_an_edit_holds_a_part_of_the_budget_until_the_engine_has_its_image(
    editing: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = editing.omni.orchestrator.media_budget
    held: list[tuple[int, int]] = []
    is_released, end = asyncio.Event(), budget.end

    def note(holding: Holding) -> None:
        held.append((holding.num_bytes, len(holding.media)))
        end(holding)
        is_released.set()

    monkeypatch.setattr(budget, "end", note)
    height, width, _ = make_pixels().shape
    long = {**EDIT, "num_inference_steps": "900"}
    answer = asyncio.ensure_future(editing.client.post("/v1/images/edits", data=long, files={"image": PICTURE}))
    await asyncio.wait({answer, asyncio.ensure_future(is_released.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not answer.done()
    assert (budget.num_held_bytes, budget.num_prompts) == (0, 0)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert held == [(4 * width * height * 4, 0)]


async def test_images_beyond_the_budget_are_rejected(editing: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = editing.omni.orchestrator.media_budget
    files = {"image": PICTURE}
    monkeypatch.setattr(budget, "num_bytes", 100)
    response = await editing.client.post("/v1/images/edits", data=EDIT, files=files)
    assert response.status_code == 400
    assert "bytes to decode and process: at most 100 are possible" in response.json()["error"]["message"]
    monkeypatch.undo()
    monkeypatch.setattr(budget, "max_prompts", 0)
    response = await editing.client.post("/v1/images/edits", data=EDIT, files=files)
    assert response.status_code == 429
    assert response.headers["Retry-After"]
    assert "raise VLLM_OMNI_MAX_WAITING_MEDIA" in response.json()["error"]["message"]
    assert (budget.num_held_bytes, budget.num_prompts) == (0, 0)


# -- /v1/videos/sync ---------------------------------------------------------------------------------------------------

WITH_PICTURE = {"image_reference": {"image_url": url_of(PICTURE)}}
FILM = {"prompt": "a tram", "size": "32x32", "seed": 1, "num_inference_steps": 2, "num_frames": 5, "fps": 8}


MAX_NUM_SEQS = 4


@pytest.fixture(scope="module")
async def animator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    flag = f"--stage=diffusion.max_num_seqs={MAX_NUM_SEQS}"
    async with asked(tmp_path_factory.mktemp("video") / "tiny", "wan2.2-i2v", flag) as client:
        yield client


def check_same_film(film: bytes, other: bytes) -> None:
    """Not to the byte: a sum in another order changes a few levels by one, and the codec makes up to 26 of these.

    With up to 60 levels changed the mean is below 3; it is 8 with another image, and 14 with another prompt.
    """
    frames, others = (decode_video(one)[0].int() for one in (film, other))
    assert frames.shape == others.shape and (frames - others).abs().float().mean() <= 4


@pytest.mark.parametrize(("name", "kind"), [("mp4", "video/mp4"), ("webm", "video/webm"), ("gif", "image/gif")])
async def test_a_video_is_a_file_of_its_frames(animator: httpx.AsyncClient, name: str, kind: str) -> None:
    body = {**FILM, "image_reference": {"image_url": url_of(PICTURE)}, "output_format": name}
    response = await animator.post("/v1/videos/sync", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == kind
    frames, times = decode_video(response.content)
    assert frames.shape == (5, 32, 32, 3)
    assert times[-1] == pytest.approx(0.5, abs=0.03)  # a gif's frames last whole hundredths of a second


async def test_a_form_gives_the_same_video(animator: httpx.AsyncClient) -> None:
    body = {**FILM, "image_reference": {"image_url": url_of(PICTURE)}}
    by_json = await animator.post("/v1/videos/sync", json=body)
    form = {name: str(value) for name, value in FILM.items()}
    by_form = await animator.post("/v1/videos/sync", data=form, files={"input_reference": PICTURE})
    check_same_film(by_json.content, by_form.content)
    other = await animator.post("/v1/videos/sync", data=form, files={"input_reference": OTHER})
    assert not torch.equal(decode_video(other.content)[0], decode_video(by_form.content)[0])


async def test_seconds_are_frames_by_the_rate(animator: httpx.AsyncClient) -> None:
    body = {name: value for name, value in FILM.items() if name != "num_frames"}
    more = {"seconds": "1.125", **WITH_PICTURE}
    response = await animator.post("/v1/videos/sync", json={**body, **more})
    assert len(decode_video(response.content)[0]) == 9


BAD_VIDEOS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"seconds": 1}, "seconds", "cannot be combined with num_frames"),
    ({"num_frames": 0}, "num_frames", "must be at least 1"),
    ({"num_frames": 325, **WITH_PICTURE}, "num_frames", "at most 324 frames here"),
    ({"size": "2048x2048", **WITH_PICTURE}, "size", "at most 1597440 pixels here"),
    ({"fps": 0}, "fps", "must be at least 1"),
    ({"output_format": "mpeg"}, "output_format", "unknown video format"),
    ({"image_reference": "x"}, "image_reference", "must be an object in JSON"),
    ({"image_reference": {}}, "image_reference", "must have an image_url"),
    ({"guidance_scale_2": -1}, "guidance_scale_2", "at least 0"),
    ({}, None, "needs an input image"),
]


async def test_a_bad_field_of_a_video_is_rejected_by_name(animator: httpx.AsyncClient) -> None:
    for change, param, reason in BAD_VIDEOS:
        response = await animator.post("/v1/videos/sync", json={**FILM, **change})
        assert response.status_code == 400, change
        error = response.json()["error"]
        assert error["param"] == param, change
        assert reason in error["message"], change


async def test_the_reading_of_an_image_for_a_video_ends_at_the_deadline(animator: httpx.AsyncClient) -> None:
    with silent_host() as host:
        body = {**FILM, "image_reference": {"image_url": host}, "deadline_s": 0.3}
        check_late(await animator.post("/v1/videos/sync", json=body))


async def test_a_job_makes_the_video_of_the_synchronous_route(animator: httpx.AsyncClient) -> None:
    body = {**FILM, **WITH_PICTURE}
    sync = await animator.post("/v1/videos/sync", json=body)
    form = {name: str(value) for name, value in FILM.items()}
    for created in (
        await animator.post("/v1/videos", json=body),
        await animator.post("/v1/videos", data=form, files={"input_reference": PICTURE}),
    ):
        assert created.status_code == 200, created.text
        video = await until(animator, created.json()["id"], "completed")
        assert (video["size"], video["seconds"], video["model"]) == ("32x32", "0.625", "tiny")
        content = await animator.get(f"/v1/videos/{video['id']}/content")
        check_same_film(content.content, sync.content)


async def until(client: httpx.AsyncClient, video_id: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (video := (await client.get(f"/v1/videos/{video_id}")).json())["status"] != status:
            assert video["status"] in ("queued", "in_progress"), video  # not ended in another way
            await asyncio.sleep(0.05)
    found: dict[str, Any] = video
    return found


async def test_a_job_that_runs_counts_its_steps_and_is_aborted_by_its_deletion(animator: httpx.AsyncClient) -> None:
    created = await animator.post("/v1/videos", json={**FILM, **WITH_PICTURE, "num_inference_steps": 900})
    video = created.json()
    async with asyncio.timeout(60):
        while not (await animator.get(f"/v1/videos/{video['id']}")).json()["progress"]:  # noqa: ASYNC110 as clients do
            await asyncio.sleep(0.05)
    assert (await animator.delete(f"/v1/videos/{video['id']}")).status_code == 200
    assert (await animator.get(f"/v1/videos/{video['id']}")).status_code == 404
    metrics = animator._transport.app.state.engine_client.orchestrator.runtime.statistics()  # type: ignore[attr-defined]
    assert (metrics.num_open_calls, metrics.num_running_activations) == (0, 0)


async def test_a_job_is_queued_while_the_engine_runs_as_many_as_it_can(animator: httpx.AsyncClient) -> None:
    body = {**FILM, **WITH_PICTURE, "num_inference_steps": 900}
    running = [(await animator.post("/v1/videos", json=body)).json() for _ in range(MAX_NUM_SEQS)]
    for video in running:  # one that an earlier test has deleted may still have its place
        await until(animator, video["id"], "in_progress")
    queued = (await animator.post("/v1/videos", json=body)).json()
    assert (queued["status"], queued["progress"]) == ("queued", 0)
    await animator.delete(f"/v1/videos/{running[0]['id']}")
    await until(animator, queued["id"], "in_progress")
    for video in (*running[1:], queued):
        assert (await animator.delete(f"/v1/videos/{video['id']}")).status_code == 200


async def test_a_job_fails_at_its_deadline(animator: httpx.AsyncClient) -> None:
    body = {**FILM, **WITH_PICTURE, "num_inference_steps": 900, "num_frames": 33, "deadline_s": 2}
    created = await animator.post("/v1/videos", json=body)
    assert created.status_code == 200, created.text
    video = await until(animator, created.json()["id"], "failed")
    assert (video["error"]["code"], "deadline" in video["error"]["message"]) == ("gateway_timeout", True)


BAD_JOBS: list[tuple[dict[str, Any], str]] = [
    ({"size": "33x32"}, "size"),
    ({"num_frames": 325}, "num_frames"),
    ({"prompt": "a " * 100_000}, "prompt"),
    ({"num_inference_steps": 10_000}, "num_inference_steps"),
    ({"image_reference": {"image_url": "data:image/png;base64,AAAA"}}, "image_reference"),
    ({"model": "other"}, "model"),
]


async def test_what_the_pipeline_rejects_is_an_error_of_the_request_for_a_job(animator: httpx.AsyncClient) -> None:
    before = (await animator.get("/v1/videos")).json()["first_id"]
    for change, param in BAD_JOBS:
        response = await animator.post("/v1/videos", json={**FILM, **WITH_PICTURE, **change})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param), (param, error)
    assert "needs an input image" in (await animator.post("/v1/videos", json=FILM)).text
    assert (await animator.get("/v1/videos")).json()["first_id"] == before


async def test_no_chat_answers_with_a_video(animator: httpx.AsyncClient) -> None:
    response = await animator.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert "/v1/videos/sync" in response.json()["error"]["message"]


# -- /v1/audio/generate ------------------------------------------------------------------------------------------------

FLAC = {"format": "flac"}
RAIN = {"input": "rain", "seed": 2, "num_inference_steps": 3, "audio_length": 0.01}


class Composer(NamedTuple):
    """The shared engine, and a client of a server of it."""

    llm: OmniLLM
    client: httpx.AsyncClient


@pytest.fixture
def composer(engines: SharedEngines) -> Composer:
    llm = engines.get(STABLE_AUDIO)
    parsed = parse_serve_args([llm.engine.config.model, "--served-model-name=tiny"])
    transport = httpx.ASGITransport(llm.run(build_omni_app(llm.engine, parsed.args)))
    return Composer(llm, httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60))


@pytest.mark.parametrize(("name", "kind"), [("wav", "audio/wav"), ("flac", "audio/flac")])
@on_the_loop_of("composer")
async def test_a_sound_is_a_file_of_both_channels(composer: Composer, name: str, kind: str) -> None:
    response = await composer.client.post("/v1/audio/generate", json={**RAIN, "response_format": name})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == kind
    samples, sample_rate = soundfile.read(io.BytesIO(response.content))
    assert (samples.shape, sample_rate) == ((441, 2), 44100)


@on_the_loop_of("composer")
async def test_a_sound_is_answered_by_url(composer: Composer) -> None:
    file = await composer.client.post("/v1/audio/generate", json=RAIN)
    answer = (await composer.client.post("/v1/audio/generate", json={**RAIN, "return_url": True})).json()
    fetched = await composer.client.get(answer["url"])
    assert (fetched.headers["content-type"], fetched.content) == ("audio/wav", file.content)
    assert answer["expires_at"] > answer["created"]


@on_the_loop_of("composer")
async def test_chat_answers_with_the_sound(composer: Composer) -> None:
    body = {"messages": [{"role": "user", "content": "rain"}], "seed": 2, "num_inference_steps": 3}
    more = {"extra_params": {"audio_start_in_s": 0.0, "audio_end_in_s": 0.01}}
    answer = (await composer.client.post("/v1/chat/completions", json={**body, **more})).json()
    message = answer["choices"][0]["message"]
    file = await composer.client.post("/v1/audio/generate", json=RAIN)
    assert base64.b64decode(message["audio"]["data"]) == file.content
    answer = (await composer.client.post("/v1/chat/completions", json={**body, **more, "audio": FLAC})).json()
    message = answer["choices"][0]["message"]
    file = await composer.client.post("/v1/audio/generate", json={**RAIN, "response_format": "flac"})
    assert base64.b64decode(message["audio"]["data"]) == file.content
    for audio, param in (({"format": "wave"}, "audio.format"), ({"voice": "alloy"}, "audio.voice")):
        response = await composer.client.post("/v1/chat/completions", json={**body, "audio": audio})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


BAD_SOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"audio_length": 0}, "audio_length"),
    ({"audio_length": 1e9}, "audio_length"),
    ({"audio_length": None, "audio_start": 1}, "audio_length"),
    ({"response_format": "wave"}, "response_format"),
    ({"num_inference_steps": -1}, "num_inference_steps"),
]


@on_the_loop_of("composer")
async def test_a_bad_field_of_a_sound_is_rejected_by_name(composer: Composer) -> None:
    for change, param in BAD_SOUNDS:
        response = await composer.client.post("/v1/audio/generate", json={**RAIN, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), change
