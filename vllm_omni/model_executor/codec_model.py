"""``CodecModel``: a causal codec decoder as a stage; each request has a stream of frames, and gives their sound.

A family derives a class from it, and makes the stage's requests by ``decode_frames``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input

from vllm_omni.errors import ConfigError
from vllm_omni.flow import Chunk
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.messages.request import StageRequest
from vllm_omni.messages.stage_step import FRAME_CHUNKS
from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.speech.codec_config import CodecConfig
from vllm_omni.speech.codec_decoder import CodecDecoder
from vllm_omni.speech.codec_streams import CodecStreams


@dataclass(frozen=True)
class FrameChunks:
    """How many frames a step decodes for a request: ``first``, then twice as many each time, up to ``size``.

    The sound does not depend on it. Small chunks come early, large ones cost less.

    Raises:
        ConfigError: the first chunk is empty, or larger than the others.
    """

    first: int = 1
    size: int = 25

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.size:
            raise ConfigError(f"first = {self.first}: must lie in [1, size = {self.size}]")


async def decode_frames(
    chunks: AsyncIterator[Chunk], sizes: FrameChunks, args: Mapping[str, Any] | None = None
) -> AsyncIterator[Chunk]:
    """Make the decoder's request of a talker's outputs: as soon as there is a stream of its frames, or else when it has
    ended, with all of them. A talker without a frame gives none: the sound is empty.

    Args:
        args: more arguments of the request: ``context``.
    """
    payloads: list[Payload] = []
    async for chunk in chunks:
        payloads += chunk.payload.payloads if chunk.payload is not None else ()
        if payloads and payloads[0].streams:
            payloads = [replace(payloads[0], values=None)]
            break
    if payloads:
        args = {"payloads": [encode(one) for one in payloads], FRAME_CHUNKS: asdict(sizes), **(args or {})}
        yield Chunk(StageRequest(tokens_input([0]), args), seq=0, last=True)


def codec_config(architecture: str, section: Mapping[str, Any]) -> PreTrainedConfig:
    """What ``hf_overrides`` returns for the stage.

    Args:
        section: the decoder's, of the checkpoint's configuration.
    """
    return GenerationConfig(architectures=[architecture], model_config=dict(section), dtype="float32")


@dataclass
class DecodedStream:
    """One request: its stream, and the frames that the next step decodes."""

    stream_id: str
    frames: Tensor | None = None  # int64 [num_quantizers, n]; None: nothing is left, the request ends


class CodecModel(GenerationModel):
    """Frames of codes -> waveform, always in float32: the sound of a stream is that of its whole decode."""

    weight_prefix = ""  # of the decoder's tensors in the checkpoint

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.decoder = CodecDecoder(CodecConfig.of(vllm_config.model_config.hf_config.model_config)).float()
        self.max_streams = vllm_config.scheduler_config.max_num_seqs
        self.num_state_bytes = 4 * self.max_streams * sum(map(_numel, self.decoder.state_shapes))
        self._numbers = count()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        known = self.decoder.state_dict()
        state = {
            short: tensor.float()
            for name, tensor in weights
            if name.startswith(self.weight_prefix) and (short := name.removeprefix(self.weight_prefix)) in known
        }
        self.decoder.load_state_dict(state, strict=True)
        return {self.weight_prefix + name for name in state}

    def prepare(self) -> None:
        self.streams = CodecStreams(self.decoder, self.max_streams)

    def read(self, args: Mapping[str, Any]) -> DecodedStream:
        """Open a stream.

        Args:
            args: ``context`` (optional; bytes, int16, frame by frame): frames that come before the request's own, and
                whose sound is dropped: those of a voice's recording.

        Raises:
            ValueError: a code outside the codebook.
        """
        request = DecodedStream(str(next(self._numbers)))
        self.streams.open(request.stream_id)
        try:
            if context := args.get("context"):
                codes = torch.frombuffer(bytearray(context), dtype=torch.int16).long()
                self.extend(request, codes.reshape(-1, self.decoder.config.num_quantizers))
                self.generate([request])
        except BaseException:
            self.release(request)
            raise
        return request

    def extend(self, request: DecodedStream, frames: Tensor) -> None:
        config = self.decoder.config
        if frames.shape[1] != config.num_quantizers:
            raise ValueError(f"a frame has {frames.shape[1]} codes, and the decoder reads {config.num_quantizers}")
        if not 0 <= int(frames.min()) <= int(frames.max()) < config.codebook_size:
            raise ValueError(f"codes must lie in [0, {config.codebook_size}), got {frames.min()}..{frames.max()}")
        request.frames = frames.T

    def generate(self, batch: Sequence[DecodedStream]) -> list[dict[str, Tensor]]:
        """Decode the frames of each request behind those of earlier steps.

        Returns:
            For each, ``audio``: float32 [num_samples]; empty where no frames are left.
        """
        frames = {one.stream_id: one.frames for one in batch if one.frames is not None}
        waves = self.streams.push(frames)
        for one in batch:
            one.frames = None
        return [{"audio": waves.get(one.stream_id, torch.zeros(0))} for one in batch]

    def release(self, request: DecodedStream) -> None:
        self.streams.close(request.stream_id)


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
