"""``encode_voice``: the function of a pipeline that clones voices which encodes recordings, in a process of its own.

It reads the encoders' tensors from the checkpoint, a small part of it, with the first recording. They run on the CPU in
float32: codes are the nearest rows of tables, and a recording is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from vllm_omni.errors import OmniError
from vllm_omni.flow import Activation, Emission
from vllm_omni.speech.voice_encoder import CodecEncoder, SpeakerEncoder, VoiceEncoder

TOKENIZER = "speech_tokenizer"  # the folder of the codec's checkpoint
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


async def encode_voice(activation: Activation) -> AsyncIterator[Emission]:
    """Encode the recording of a request.

    Its input is a mapping: ``model`` and ``revision`` of the checkpoint, ``samples`` (bytes, float32 at 24 kHz) and
    ``with_codes``. Its output has the fields of ``VoiceFeatures`` of ``entrypoints/voice_cloning.py``.
    """
    async for chunk in activation.inputs["recording"]:
        given = chunk.payload
        encoder = load_voice_encoder(given["model"], given["revision"])
        yield Emission("voice", encode(encoder, given["samples"], with_codes=given["with_codes"]))


@torch.inference_mode()
def encode(encoder: VoiceEncoder, samples: bytes, *, with_codes: bool) -> dict[str, Any]:
    """Features of one recording; several together would have to be of one length, as padding changes codes."""
    waves = torch.from_numpy(np.frombuffer(samples, np.float32).copy())[None]
    (features,) = encoder(waves, with_codes=with_codes)
    made = {"x_vector": features.x_vector.numpy().tobytes()}
    if features.codes is None:
        return made
    return made | {"codes": features.codes.numpy().astype(np.int16).tobytes(), "num_frames": len(features.codes)}


@cache
def load_voice_encoder(model: str, revision: str | None = None) -> VoiceEncoder:
    """The encoders of a checkpoint, ready to run.

    Raises:
        OmniError: it lacks tensors, or has others.
    """
    config, codec = (_read(model, "config.json", revision, folder) for folder in ("", TOKENIZER))
    groups = config["talker_config"]["num_code_groups"]
    encoder = VoiceEncoder(
        SpeakerEncoder(config["speaker_encoder_config"]),
        CodecEncoder(codec["encoder_config"], groups, codec["encode_downsample_rate"]),
    )
    tensors = dict(_tensors(model, revision, "", "speaker_encoder."))
    tensors |= _tensors(model, revision, TOKENIZER, "encoder.")
    try:
        encoder.float().load_state_dict(tensors, strict=True)
    except RuntimeError as exc:
        raise OmniError(f"{model}: the encoders of voices cannot be loaded: {exc}") from exc
    return encoder.eval()


def _read(model: str, name: str, revision: str | None, folder: str) -> dict[str, Any]:
    path = cached_file(model, name, subfolder=folder, revision=revision)
    content: dict[str, Any] = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    return content


def _tensors(model: str, revision: str | None, folder: str, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors with a prefix, of one file or of several with an index."""
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    if cached_file(model, INDEX, subfolder=folder, revision=revision, **missing) is None:
        names = {WEIGHTS}
    else:
        files = _read(model, INDEX, revision, folder)["weight_map"].items()
        names = {file for name, file in files if name.startswith(prefix)}
    for file in sorted(names):
        path = cached_file(model, file, subfolder=folder, revision=revision)
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name.startswith(prefix):
                    yield name, opened.get_tensor(name).float()
