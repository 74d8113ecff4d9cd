"""A pipeline of videos without an engine, whose steps a test makes one by one."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request
from vllm.outputs import RequestOutput

from vllm_omni.engine.running import RunningRequests
from vllm_omni.entrypoints.openai.arrivals import count_arrivals
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing, InputImages
from vllm_omni.entrypoints.openai.diffusion_app import add_media_routes
from vllm_omni.entrypoints.openai.diffusion_protocol import DiffusionFields
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.results import Results
from vllm_omni.entrypoints.openai.schema import describe_app
from vllm_omni.messages.outputs import OmniRequestOutput

NUM_STEPS = 4
FRAMES = torch.linspace(0, 255, 8).to(torch.uint8)[None, :, None, None, None].expand(1, 8, 32, 48, 3)


def make_output(**media: Any) -> OmniRequestOutput:
    finished = "frames" in media
    output = OmniRequestOutput.of(RequestOutput("film", None, [0], None, [], finished))
    output.multimodal_output = media
    return output


class Film(DiffusionServing):
    """Yields what the test puts: a step, ``FRAMES``, or an error to raise.

    Attributes:
        running: prompts of requests that run.
        aborted: of those that were closed before their end.
        given: fields and images of the last request.
    """

    def __init__(self, modality: str = "video") -> None:
        self.modality = modality
        self.steps: asyncio.Queue[int | torch.Tensor | Exception] = asyncio.Queue()
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.has_started = asyncio.Event()  # a request
        self.given: tuple[DiffusionFields, InputImages] | None = None

    def model_name(self, fields: DiffusionFields) -> str:
        return fields.model or "tiny"

    async def outputs(
        self, prompt: str, fields: DiffusionFields, images: InputImages, raw_request: Request
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.given = fields, images
        self.running.append(prompt)
        self.has_started.set()
        has_ended = False
        try:
            while not has_ended:
                match await self.steps.get():
                    case Exception() as exc:
                        has_ended = True
                        raise exc
                    case int(step):
                        yield make_output(step=step, num_steps=NUM_STEPS if step else 0)
                    case frames:
                        has_ended = True
                        yield make_output(frames=frames, fps=8, step=NUM_STEPS, num_steps=NUM_STEPS)
        finally:
            self.running.remove(prompt)
            if not has_ended:
                self.aborted.append(prompt)

    def put(self, *steps: int | torch.Tensor | Exception) -> None:
        for step in steps:
            self.steps.put_nowait(step)


@dataclass
class Studio:
    """A server of a ``Film``; several share a directory."""

    film: Film = field(default_factory=Film)
    results: Results = field(default_factory=Results)
    requests: RunningRequests = field(default_factory=RunningRequests)
    app: FastAPI = field(default_factory=FastAPI)

    def __post_init__(self) -> None:
        add_media_routes(self.app, {self.film.modality: self.film}, self.results, self.requests, 0.0)
        count_arrivals(self.app, self.requests)
        add_error_handlers(self.app)
        describe_app(self.app, "tiny")
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="https://films.example", timeout=30
        )

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.client.get(path, **more)

    async def post(self, **fields: Any) -> dict[str, Any]:
        """Create a job; its state."""
        response = await self.client.post("/v1/videos", json={"prompt": "a tram", **fields})
        assert response.status_code == 200, response.text
        made: dict[str, Any] = response.json()
        return made

    async def state(self, video: dict[str, Any]) -> dict[str, Any]:
        response = await self.get(f"/v1/videos/{video['id']}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def until(self, video: dict[str, Any], **expected: Any) -> dict[str, Any]:
        """Wait until a job has such a state."""
        async with asyncio.timeout(60):
            while not (found := await self.state(video)).items() >= expected.items():  # noqa: ASYNC110 as clients do
                await asyncio.sleep(0.01)
        return found

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Create a job, and complete it."""
        self.film.put(0, FRAMES)
        return await self.until(await self.post(**fields), status="completed")


@pytest.fixture
def files_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_OMNI_FILES_DIR", str(tmp_path / "files"))
    return tmp_path / "files"
