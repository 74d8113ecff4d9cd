"""What a stage answers, and what the user gets: one class."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from vllm.outputs import RequestOutput

from vllm_omni.errors import OmniError
from vllm_omni.media.audio import AUDIO_FORMATS, AUDIO_SUFFIXES, encode_audio
from vllm_omni.media.image import IMAGE_FORMATS, IMAGE_SUFFIXES, encode_image, to_image
from vllm_omni.media.video import DEFAULT_FPS, VIDEO_FORMATS, VIDEO_SUFFIXES, encode_video
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.slo import SloReport
from vllm_omni.names import suggest
from vllm_omni.vllm_patches import adopt


class Progress(NamedTuple):
    """How far a denoising loop is."""

    step: int  # denoise steps done
    num_steps: int  # of all; 0: not known yet


class OmniRequestOutput(RequestOutput):
    """vLLM's ``RequestOutput`` with the other modalities beside the text.

    Attributes:
        outputs: the text, as vLLM gives it.
        multimodal_output: ``audio`` (float32 Tensor [num_samples]; of a diffusion pipeline [N, C, num_samples]),
            ``sample_rate`` (Hz), and on request ``codec_ids`` (list[int]). Of a diffusion pipeline also ``images``
            (uint8 [N, H, W, 3]), ``frames`` (uint8 [N, T, H, W, 3]) with ``fps``, ``latents``, and while it runs
            ``step``, ``num_steps`` and ``preview`` (uint8 [H, W, 3]). Deltas while streaming, everything in a final
            output.
        payloads: references for the next stage; empty in what the user gets.
        stage_durations: seconds from a stage's request to its last output, by stage that has ended; in the last output
            also ``total``.
        latency_parts: in the last output, by autoregressive stage that has ended: its seconds by part (``Part`` of
            ``engine/latency.py``: ``encode_queueing``, ``encode_execution``, ``ep_migration``, ``prefill_queueing``,
            ``prefill_execution``, ``pd_migration``, ``decode_queueing``, ``decode_execution``). They sum to the time
            from the request's arrival there to its last token; a part that it did not have is 0.
        slo_reports: likewise how it did, by stage whose parameters or deployment have an SLO.
    """

    multimodal_output: dict[str, Any]
    payloads: list[Payload]
    stage_durations: dict[str, float]
    latency_parts: dict[str, dict[str, float]]
    slo_reports: dict[str, SloReport]

    @classmethod
    def of(cls, output: RequestOutput) -> OmniRequestOutput:
        """The same output with room for the other modalities; shares its fields with ``output``."""
        omni = adopt(cls, output)
        omni.multimodal_output, omni.payloads, omni.stage_durations = {}, [], {}
        omni.latency_parts, omni.slo_reports = {}, {}
        return omni

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one; nothing of either is lost."""
        super().add(next_output, aggregate)
        if isinstance(next_output, OmniRequestOutput):
            merge_multimodal(self.multimodal_output, next_output.multimodal_output)
            self.payloads += next_output.payloads
            self.stage_durations |= next_output.stage_durations
            self.latency_parts |= next_output.latency_parts
            self.slo_reports |= next_output.slo_reports

    # -- what a diffusion pipeline made: one of N outputs each ---------------------------------------------------------

    @property
    def images(self) -> list[Image.Image]:
        """The images; none where the answer has none."""
        return [to_image(pixels) for pixels in self.multimodal_output.get("images", ())]

    @property
    def video(self) -> Tensor | list[Tensor] | None:
        """Frames [T, H, W, 3], uint8 (float in [0, 1] if asked for); a list where there are several videos."""
        videos = self.multimodal_output.get("frames")
        if videos is None:
            return None
        return videos[0] if len(videos) == 1 else list(videos)

    @property
    def fps(self) -> int | None:
        """Frames per second of the video."""
        if "frames" not in self.multimodal_output:
            return None
        return int(self.multimodal_output.get("fps") or DEFAULT_FPS)

    @property
    def latents(self) -> Tensor | None:
        """What the denoiser left, if the request asked for ``output_type="latents"``."""
        return self.multimodal_output.get("latents")

    @property
    def progress(self) -> Progress | None:
        """Of a request that asked for it."""
        if "step" not in self.multimodal_output:
            return None
        return Progress(self.multimodal_output["step"], self.multimodal_output.get("num_steps", 0))

    @property
    def preview(self) -> Image.Image | None:
        """What the denoiser has so far, small, of a request that asked for it."""
        pixels = self.multimodal_output.get("preview")
        return None if pixels is None else to_image(pixels)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> list[Path]:
        """Write what was made to a file; the suffix chooses the format: of an image, a video or a sound.

        Several outputs become several files: ``cat.png`` becomes ``cat-0.png``, ``cat-1.png``, and so on.

        Returns:
            The files, in the order of the outputs.

        Raises:
            OmniError: the answer has nothing of that kind.
            ValueError: unknown suffix.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in IMAGE_SUFFIXES:
            self._require("images", path)
            images, image_format = self.images, IMAGE_FORMATS[IMAGE_SUFFIXES[suffix]]
            return _write(path, len(images), lambda index: encode_image(images[index], image_format))
        if suffix in VIDEO_SUFFIXES:
            self._require("frames", path)
            videos, sounds = self.multimodal_output["frames"], self.multimodal_output.get("audio")
            video_format, fps = VIDEO_FORMATS[VIDEO_SUFFIXES[suffix]], self.fps or DEFAULT_FPS
            sample_rate = self.multimodal_output.get("sample_rate")

            def encode(index: int) -> bytes:
                sound = None if sounds is None else sounds[index]
                return encode_video(videos[index], fps, video_format, sound, sample_rate)

            return _write(path, len(videos), encode)
        if suffix in AUDIO_SUFFIXES:
            self._require("audio", path)
            sounds, sample_rate = self.multimodal_output["audio"], self.multimodal_output["sample_rate"]
            sounds = sounds if sounds.ndim == 3 else sounds[None]  # speech is one
            audio_format = AUDIO_FORMATS[AUDIO_SUFFIXES[suffix]]
            return _write(path, len(sounds), lambda index: encode_audio(sounds[index], sample_rate, audio_format))
        known = self._suffixes() or [*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *AUDIO_SUFFIXES]
        said = f"unknown suffix {path.suffix!r}" if suffix else "it has no suffix"
        raise ValueError(f"cannot write to {path.name!r}: {said}: {suggest(suffix, known)}")

    def save_audio(self, path: str | Path) -> Path:
        """Write the speech to a file; the suffix chooses the format (``AUDIO_SUFFIXES``).

        Raises:
            OmniError: the request has no audio.
            ValueError: unknown suffix.
        """
        if "audio" not in self.multimodal_output:
            raise OmniError("this answer has no audio: ask for it with modalities=['text', 'audio']")
        path = Path(path)
        if path.suffix.lower() not in AUDIO_SUFFIXES:
            known = ", ".join(AUDIO_SUFFIXES)
            raise ValueError(f"cannot write audio to {path.name!r}: unknown suffix {path.suffix!r}; known: {known}")
        return self.save(path)[0]

    def _require(self, name: str, path: Path) -> None:
        if name in self.multimodal_output:
            return
        what = _KINDS[name][0]
        suffixes = self._suffixes()
        if suffixes:
            has = " and ".join(_KINDS[one][0] for one in _KINDS if one in self.multimodal_output)
            instead = f"it has {has}: {', '.join(suffixes)}"
        elif "latents" in self.multimodal_output:
            instead = "it has latents, which are no file: read .latents, or ask for output_type='media'"
        elif not self.finished:
            instead = "it has not ended"
        else:
            instead = "it has text alone"
        raise OmniError(f"cannot write {path.name!r}: this answer has no {what.split()[-1]}; {instead}")

    def _suffixes(self) -> list[str]:
        """Those that ``save`` can write."""
        return [suffix for name, (_, known) in _KINDS.items() if name in self.multimodal_output for suffix in known]

    def __repr__(self) -> str:
        media = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in self.multimodal_output.items()}
        return f"{super().__repr__()[:-1]}, multimodal_output={media}, stage_durations={self.stage_durations})"


_KINDS: dict[str, tuple[str, Sequence[str]]] = {
    "images": ("an image", tuple(IMAGE_SUFFIXES)),
    "frames": ("a video", tuple(VIDEO_SUFFIXES)),
    "audio": ("a sound", tuple(AUDIO_SUFFIXES)),
}


def _write(path: Path, num_outputs: int, encode: Callable[[int], bytes]) -> list[Path]:
    paths = [path] if num_outputs == 1 else [path.with_stem(f"{path.stem}-{index}") for index in range(num_outputs)]
    for index, one in enumerate(paths):
        one.write_bytes(encode(index))
    return paths


def merge_multimodal(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Append ``new`` to ``into`` in place: tensors along the first dimension, lists likewise, the rest replaces.

    A preview is no piece of the answer: each replaces the one before.
    """
    for name, value in new.items():
        if name in into and isinstance(value, torch.Tensor) and name != "preview":
            into[name] = torch.cat([into[name], value])
        elif name in into and isinstance(value, list):
            into[name] = into[name] + value
        else:
            into[name] = value


async def collect(
    outputs: AsyncGenerator[OmniRequestOutput, None], on_update: Callable[[OmniRequestOutput], None] | None = None
) -> OmniRequestOutput:
    """Merge the stream of one request into one output, and close the stream.

    Args:
        on_update: called with the merged output after each one of the stream.
    """
    merged: OmniRequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if merged is None:
                merged = output
            else:
                merged.add(output, aggregate=True)
            if on_update is not None:
                on_update(merged)
    assert merged is not None, "a request ends with an output or an error"
    return merged
