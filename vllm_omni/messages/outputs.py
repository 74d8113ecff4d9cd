"""``OmniRequestOutput``: the output of a stage, and of a request, with every modality."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.errors import OmniError
from vllm_omni.media.audio import AUDIO_FORMATS, AUDIO_SUFFIXES, encode_audio
from vllm_omni.media.image import IMAGE_FORMATS, IMAGE_SUFFIXES, encode_image, to_image
from vllm_omni.media.video import DEFAULT_FPS, VIDEO_FORMATS, VIDEO_SUFFIXES, encode_video
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.request import PromptCache
from vllm_omni.messages.slo import SloReport
from vllm_omni.messages.token_names import TokenNames
from vllm_omni.names import suggest
from vllm_omni.vllm_patches import adopt


class Progress(NamedTuple):
    """Progress of a denoising loop."""

    step: int  # denoise steps that are done
    num_steps: int  # in all; 0: not known yet


class OmniRequestOutput(RequestOutput):
    """vLLM's ``RequestOutput`` with the other modalities beside the text.

    Attributes:
        outputs: the text, as in vLLM.
        multimodal_output: ``audio`` (float32 Tensor [num_samples]; of a diffusion pipeline [N, C, num_samples]),
            ``sample_rate`` (Hz), and on request ``codec_ids`` (list[int]; of Qwen3-TTS a list for each frame, with the
            codes of all groups). The texts of further stages (str), by the
            names of their modalities. Of a diffusion pipeline also ``images`` (uint8 [N, H, W, 3]), ``frames`` (uint8
            [N, T, H, W, 3]) with ``fps``, ``latents``, and while it runs ``step``, ``num_steps`` and ``preview`` (uint8
            [H, W, 3]). Of a second output of a kind, by another stage, the same under ``sketch.images``, where
            "sketch" is its modality. Deltas while streaming, everything in a final output.
        payloads: references for the next stage; empty in a user's output.
        row_names: of the prompt's rows, with payloads that have them; None in a user's output.
        prompt_cache: where the prompt's KV cache lies, for the next stage; None in a user's output.
        stage_durations: seconds from a stage's request to its last output, by stage that has ended; in the last output
            also ``total``.
        latency_parts: in the last output, by autoregressive stage that has ended: its seconds by part (``Part`` of
            ``engine/latency.py``), which sum to the time from the request's arrival there to its last token.
        slo_reports: in the last output, whether the SLO was met, by stage whose parameters or deployment have one.
    """

    multimodal_output: dict[str, Any]
    payloads: list[Payload]
    prompt_cache: PromptCache | None
    row_names: TokenNames | None
    stage_durations: dict[str, float]
    latency_parts: dict[str, dict[str, float]]
    slo_reports: dict[str, SloReport]

    @classmethod
    def of(cls, output: RequestOutput) -> OmniRequestOutput:
        """Extend vLLM's output by the other modalities; shares its fields with ``output``."""
        omni = adopt(cls, output)
        omni.add_fields()
        return omni

    def add_fields(self) -> None:
        """Set the fields that vLLM's output has not to nothing."""
        self.multimodal_output, self.payloads, self.stage_durations = {}, [], {}
        self.latency_parts, self.slo_reports, self.prompt_cache, self.row_names = {}, {}, None, None

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one; nothing of either is lost."""
        super().add(next_output, aggregate)
        if isinstance(next_output, OmniRequestOutput):
            merge_multimodal(self.multimodal_output, next_output.multimodal_output)
            self.payloads += next_output.payloads
            self.prompt_cache = next_output.prompt_cache or self.prompt_cache
            self.row_names = next_output.row_names or self.row_names
            self.stage_durations |= next_output.stage_durations
            self.latency_parts |= next_output.latency_parts
            self.slo_reports |= next_output.slo_reports

    # -- outputs of a diffusion pipeline: N of each kind --------------------------------------------------------------

    @property
    def images(self) -> list[Image.Image]:
        """The images; empty without any."""
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
        """The latents after the last step, if the request asked for ``output_type="latents"``."""
        return self.multimodal_output.get("latents")

    @property
    def progress(self) -> Progress | None:
        """Progress, if the request asked for it."""
        if "step" not in self.multimodal_output:
            return None
        return Progress(self.multimodal_output["step"], self.multimodal_output.get("num_steps", 0))

    @property
    def preview(self) -> Image.Image | None:
        """A small preview of the current latents, if the request asked for previews."""
        pixels = self.multimodal_output.get("preview")
        return None if pixels is None else to_image(pixels)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> list[Path]:
        """Write the images, videos or sounds to files; the suffix chooses the kind and format.

        Several outputs become several files: ``cat.png`` becomes ``cat-0.png``, ``cat-1.png``, and so on.

        Returns:
            The files, in the order of the outputs.

        Raises:
            OmniError: the output has nothing of that kind.
            ValueError: unknown suffix.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        name = next((name for name, kind in _KINDS.items() if suffix in kind.suffixes), None)
        if name is None:
            known = self._suffixes() or [suffix for kind in _KINDS.values() for suffix in kind.suffixes]
            said = f"unknown suffix {path.suffix!r}" if suffix else "it has no suffix"
            raise ValueError(f"cannot write to {path.name!r}: {said}: {suggest(suffix, known)}")
        self._require(name, path)
        return self._write(path, name, _KINDS[name])

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

    def _write(self, path: Path, name: str, kind: _Kind) -> list[Path]:
        media, file_format = self.multimodal_output, kind.suffixes[path.suffix.lower()]
        if name == "audio" and media["audio"].ndim < 3:  # speech is a single sound
            media = {**media, "audio": media["audio"][None]}
        num_outputs = len(media[name])
        paths = [path] if num_outputs == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(num_outputs)]
        for index, one in enumerate(paths):
            one.write_bytes(kind.encode(media, index, file_format))
        return paths

    def _require(self, name: str, path: Path) -> None:
        if name in self.multimodal_output and (name == "audio" or len(self.multimodal_output[name])):
            return
        if suffixes := self._suffixes():
            has = " and ".join(
                f"{kind.article} {kind.noun}" for key, kind in _KINDS.items() if key in self.multimodal_output
            )
            instead = f"it has {has}: {', '.join(suffixes)}"
        elif "latents" in self.multimodal_output:
            instead = "it has latents, which are no file: read .latents, or ask for output_type='media'"
        elif not self.finished:
            instead = "it has not ended"
        else:
            instead = "it has text alone"
        raise OmniError(f"cannot write {path.name!r}: this answer has no {_KINDS[name].noun}; {instead}")

    def _suffixes(self) -> list[str]:
        """The suffixes that ``save`` can write."""
        return [suffix for name, kind in _KINDS.items() if name in self.multimodal_output for suffix in kind.suffixes]

    def __repr__(self) -> str:
        media = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in self.multimodal_output.items()}
        return f"{super().__repr__()[:-1]}, multimodal_output={media}, stage_durations={self.stage_durations})"


def _encode_image(media: Mapping[str, Any], index: int, file_format: str) -> bytes:
    return encode_image(to_image(media["images"][index]), IMAGE_FORMATS[file_format])


def _encode_video(media: Mapping[str, Any], index: int, file_format: str) -> bytes:
    own = "video." if "video.audio" in media else ""  # beside speech
    sounds, fps = media.get(f"{own}audio"), int(media.get("fps") or DEFAULT_FPS)
    sound = None if sounds is None or sounds.ndim < 3 else sounds[index]  # speech is no sound of the video
    rate = media.get(f"{own}sample_rate")
    return encode_video(media["frames"][index], fps, VIDEO_FORMATS[file_format], sound, rate)


def _encode_sound(media: Mapping[str, Any], index: int, file_format: str) -> bytes:
    return encode_audio(media["audio"][index], media["sample_rate"], AUDIO_FORMATS[file_format])


class _Kind(NamedTuple):
    """A kind of file that ``save`` writes."""

    article: str
    noun: str
    suffixes: Mapping[str, str]  # of a file -> name of the format
    encode: Callable[[Mapping[str, Any], int, str], bytes]  # multimodal_output, index of the output, format


_KINDS = {  # by key of ``multimodal_output``
    "images": _Kind("an", "image", IMAGE_SUFFIXES, _encode_image),
    "frames": _Kind("a", "video", VIDEO_SUFFIXES, _encode_video),
    "audio": _Kind("a", "sound", AUDIO_SUFFIXES, _encode_sound),
}


def copy_completion(completion: CompletionOutput) -> CompletionOutput:
    """A copy into which later pieces can be merged: ``RequestOutput.add`` extends lists in place."""
    copied = adopt(CompletionOutput, completion)  # a fifth of the time of ``dataclasses.replace``, for each token
    copied.token_ids = list(completion.token_ids)
    if completion.logprobs is not None:
        copied.logprobs = completion.logprobs[:]
    if completion.sampling_mask is not None:
        copied.sampling_mask = replace(completion.sampling_mask, token_ids=list(completion.sampling_mask.token_ids))
    return copied


def merge_multimodal(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Append ``new`` to ``into`` in place, see ``join_multimodal``."""
    into.update({name: _joined(name, [into[name], value]) if name in into else value for name, value in new.items()})


def join_multimodal(pieces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join texts, lists and tensors (along the first dimension) of several outputs; of other values, take the last.

    A preview is not a piece of the output: each replaces the one before. Of errors the first stays, as the cause.
    """
    values: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, value in piece.items():
            values.setdefault(name, []).append(value)
    return {name: _joined(name, parts) for name, parts in values.items()}


def _joined(name: str, parts: list[Any]) -> Any:
    *earlier, last = parts
    if earlier and isinstance(last, torch.Tensor) and name != "preview":
        return torch.cat(parts)
    if isinstance(last, str):
        return parts[0] if name == "error" else "".join(parts)
    return [item for part in parts for item in part] if isinstance(last, list) else last


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
