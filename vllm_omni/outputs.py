"""What a stage answers, and what the user gets: one class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.outputs import RequestOutput

from vllm_omni.audio_format import AUDIO_FORMATS, AUDIO_SUFFIXES, encode_audio
from vllm_omni.errors import OmniError
from vllm_omni.relay import Payload


class OmniRequestOutput(RequestOutput):
    """vLLM's ``RequestOutput`` with the other modalities beside the text.

    Attributes:
        outputs: the text, as vLLM gives it.
        multimodal_output: ``audio`` (float32 Tensor [num_samples]), ``sample_rate`` (Hz), and on request ``codec_ids``
            (list[int]). Deltas while streaming, everything in a final output.
        payloads: references for the next stage; empty in what the user gets.
        stage_durations: seconds from a stage's request to its last output, by stage that has ended; in the last output
            also ``total``.
    """

    multimodal_output: dict[str, Any]
    payloads: list[Payload]
    stage_durations: dict[str, float]

    @classmethod
    def of(cls, output: RequestOutput) -> OmniRequestOutput:
        """The same output with room for the other modalities; shares its fields with ``output``."""
        omni = cls.__new__(cls)
        omni.__dict__.update(output.__dict__)
        omni.multimodal_output, omni.payloads, omni.stage_durations = {}, [], {}
        return omni

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one; nothing of either is lost."""
        super().add(next_output, aggregate)
        if isinstance(next_output, OmniRequestOutput):
            merge_multimodal(self.multimodal_output, next_output.multimodal_output)
            self.payloads += next_output.payloads
            self.stage_durations |= next_output.stage_durations

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
        audio_format = AUDIO_FORMATS[AUDIO_SUFFIXES[path.suffix.lower()]]
        audio, sample_rate = self.multimodal_output["audio"], self.multimodal_output["sample_rate"]
        path.write_bytes(encode_audio(audio, sample_rate, audio_format))
        return path

    def __repr__(self) -> str:
        media = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in self.multimodal_output.items()}
        return f"{super().__repr__()[:-1]}, multimodal_output={media}, stage_durations={self.stage_durations})"


def merge_multimodal(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Append ``new`` to ``into`` in place: tensors along the first dimension, lists likewise, the rest replaces.

    A preview replaces the one before it, too.
    """
    for name, value in new.items():
        if name in into and isinstance(value, torch.Tensor) and name != "preview":
            into[name] = torch.cat([into[name], value])
        elif name in into and isinstance(value, list):
            into[name] = into[name] + value
        else:
            into[name] = value
