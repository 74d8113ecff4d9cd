"""``MediaLimits``: how large a file of a request may be, checked by its header before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni.errors import InvalidRequest
from vllm_omni.media.headers import ImageHeader, SoundHeader, VideoHeader

SETTINGS = {
    "file_bytes": "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB",
    "sound_file_bytes": "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",
    "image_pixels": "VLLM_MAX_IMAGE_PIXELS",
    "sound_seconds": "VLLM_MAX_AUDIO_DECODE_DURATION_S",
    "sound_bytes": "VLLM_MAX_AUDIO_DECODE_BYTES",
    "video_seconds": "VLLM_OMNI_MAX_VIDEO_SECONDS",
    "video_frames": "VLLM_OMNI_MAX_VIDEO_FRAMES",
    "video_pixels": "VLLM_OMNI_MAX_VIDEO_PIXELS",
}
"""Limit -> the environment variable that changes it, for errors. vLLM's where it has one."""

# A rate outside of these is not one of recordings: converted to a model's rate, a sound would become huge, or vanish.
SAMPLE_RATES = range(1_000, 768_001)  # Hz
MODEL_RATE = 16_000  # Hz; sounds are converted to about this rate
SAMPLE_BYTES = 4  # float32
PIXEL_BYTES = 4  # of an image: RGBA
FRAME_PIXEL_BYTES = 3  # of a video


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one file; 0 is none. All checks raise ``InvalidRequest``, which names the setting.

    Attributes:
        file_bytes: as it is sent, from wherever it comes.
        sound_file_bytes: the same of a sound, or of a video whose sound is read.
        image_pixels: of an image, or of one frame of a video.
        sound_bytes: of a sound's samples, in float32, of all channels.
        video_frames: that a video has, of which the model reads some: the others are decoded to reach those.
        video_pixels: of all of these frames, which is what decoding them takes of a thread's time.
    """

    file_bytes: int
    sound_file_bytes: int
    image_pixels: int
    sound_seconds: float
    sound_bytes: int
    video_seconds: float
    video_frames: int
    video_pixels: int

    def check_file(self, num_bytes: int, kind: str | None = None) -> None:
        """Check the size of a file before it is read, or while it is."""
        limits = {"file_bytes": self.file_bytes}
        if kind == "audio":
            limits["sound_file_bytes"] = self.sound_file_bytes
        for name, most in limits.items():
            if most and num_bytes > most:
                raise self._error(kind, name, f"has {num_bytes:,} bytes or more", f"{most:,}")

    def check_image(self, header: ImageHeader) -> int:
        """Return how many bytes the image takes when it is decoded."""
        self._check_pixels("image", header.width, header.height, header.num_pixels)
        return header.num_pixels * PIXEL_BYTES

    def check_sound(self, header: SoundHeader) -> int:
        """Return how many bytes the sound takes when it is decoded; at most, if it does not say how long it is."""
        if header.sample_rate not in SAMPLE_RATES:
            said = f"the audio has {header.sample_rate:,} samples a second"
            valid = f"{SAMPLE_RATES.start:,} to {SAMPLE_RATES[-1]:,}"
            raise InvalidRequest(f"{said}: {valid} are read", param=param_of("audio"))
        if header.num_samples is None or header.seconds is None:
            return self.sound_bytes
        if self.sound_seconds and header.seconds > self.sound_seconds:
            raise self._error("audio", "sound_seconds", f"lasts {header.seconds:,.1f} s", f"{self.sound_seconds:g} s")
        num_bytes = header.num_samples * header.num_channels * SAMPLE_BYTES
        if self.sound_bytes and num_bytes > self.sound_bytes:
            said = f"takes {num_bytes:,} bytes to decode"
            raise self._error("audio", "sound_bytes", said, f"{self.sound_bytes:,}")
        return max(num_bytes, round(header.seconds * MODEL_RATE) * SAMPLE_BYTES)

    def check_video(self, header: VideoHeader) -> int:
        """Return how many bytes one of its frames takes when it is decoded."""
        num_pixels = header.width * header.height
        self._check_pixels("video", header.width, header.height, num_pixels)
        self.check_length(header.num_frames, header.seconds)
        if self.video_pixels and num_pixels * header.num_frames > self.video_pixels:
            said = f"has {header.num_frames:,} frames of {num_pixels:,} pixels"
            raise self._error("video", "video_pixels", said, f"{self.video_pixels:,} pixels in all frames")
        return num_pixels * FRAME_PIXEL_BYTES

    def check_length(self, num_frames: int, seconds: float) -> None:
        """Check how long a video is."""
        if self.video_seconds and seconds > self.video_seconds:
            raise self._error("video", "video_seconds", f"lasts {seconds:,.1f} s", f"{self.video_seconds:g} s")
        if self.video_frames and num_frames > self.video_frames:
            raise self._error("video", "video_frames", f"has {num_frames:,} frames", f"{self.video_frames:,}")

    def _check_pixels(self, kind: str, width: int, height: int, num_pixels: int) -> None:
        if self.image_pixels and num_pixels > self.image_pixels:
            size = f"{width}x{height}" if width * height == num_pixels else f"{width}x{height} in larger tiles"
            said = f"has {num_pixels:,} pixels ({size})"
            raise self._error(kind, "image_pixels", said, f"{self.image_pixels:,}")

    @staticmethod
    def _error(kind: str | None, limit: str, said: str, most: str) -> InvalidRequest:
        return InvalidRequest(f"the {kind or 'file'} {said}: at most {most} ({SETTINGS[limit]})", param=param_of(kind))


def unreadable(kind: str, exc: Exception) -> InvalidRequest:
    """The error for a file whose header cannot be read."""
    return InvalidRequest(f"the {kind} cannot be read: {exc}", param=param_of(kind))


def param_of(kind: str | None) -> str | None:
    """The type of a message's part, which has the file; routes with a field of another name put that in its place."""
    return kind and f"{kind}_url"
