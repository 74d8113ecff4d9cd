"""Bodies and queries of the routes of videos as jobs, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import structs
from pydantic import BaseModel, ConfigDict, Field

from vllm_omni.entrypoints.openai.diffusion_protocol import VideoRequest
from vllm_omni.entrypoints.openai.schema import BINARY, documented
from vllm_omni.files.jobs import VideoJob

MAX_LIMIT = 100
REFERENCE = {"type": "object", "properties": {"image_url": {"type": "string"}}, "required": ["image_url"]}
REFERENCES = {
    "input_reference": {
        "description": "The first image: a file, its URL, or an object with that.",
        "anyOf": [BINARY, {"type": "string"}, REFERENCE],
    },
    "image_reference": {"description": "The same, by its URL.", **REFERENCE},
}
"""Fields of a request for a video that have its images."""


class VideoJobRequest(VideoRequest):
    """A request that reports how far it is, where the pipeline can."""

    WISHES = frozenset({"progress", "notify_start"})

    def params(self) -> dict[str, Any]:
        return super().params() | dict.fromkeys(self.WISHES, True)


class VideoError(BaseModel):
    code: str
    message: str
    type: str | None = None
    param: str | None = None


class Video(BaseModel):
    """A video that is made as a job, in OpenAI's form."""

    id: str
    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = documented("Percent.", default=0, at_least=0, at_most=100)
    model: str
    prompt: str
    size: str = documented("WIDTHxHEIGHT; as in the request until it is complete.", default="auto")
    seconds: str | None = Field(default=None, description="Of the video; null while that is not known.")
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = Field(default=None, description="When it is removed; null while it is not complete.")
    error: VideoError | None = None
    media_type: str | None = Field(default=None, description="Of the file of a complete one.")
    remixed_from_video_id: str | None = None

    @classmethod
    def of(cls, job: VideoJob) -> Video:
        return cls(
            id=job.id,
            status=job.status,
            progress=job.progress,
            model=job.model,
            prompt=job.prompt,
            size=job.size,
            seconds=None if job.seconds is None else f"{job.seconds:g}",
            created_at=job.created_at,
            completed_at=job.completed_at,
            expires_at=job.expires_at,
            error=None if job.error is None else VideoError(**structs.asdict(job.error)),
            media_type=job.media_type,
        )


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class VideoListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=20, ge=1, le=MAX_LIMIT, description="Videos of a page.")
    after: str | None = Field(default=None, description="The last video of the page before.")
    order: Literal["asc", "desc"] = Field(default="desc", description="By the time of their creation.")


class VideoContentQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    variant: Literal["video", "thumbnail", "spritesheet"] = Field(
        default="video", description="The video, its middle frame (webp), or frames of it in rows (jpeg)."
    )
