"""``MiMoAudioDecoder``: codes -> sound at 24 kHz, each request decoded as a whole, always in float32.

A stream cannot be exact: group norms read the whole sound. The original decodes a minute at a time, and so does this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.config import VllmConfig

from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import (
    FRAMES_PER_PIECE,
    codec_directory,
    load_decoder,
    read_codec_config,
)

ARCHITECTURE = "MiMoAudioDecoder"


def decoder_hf_config(config: PreTrainedConfig, *, num_channels: int) -> PreTrainedConfig:
    """``hf_overrides`` of the decoder stage."""
    if not hasattr(config, "audio_channels"):  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(architectures=[ARCHITECTURE], model_config={"num_channels": num_channels}, dtype="float32")


class MiMoAudioDecoder(GenerationModel):
    """The decoder half of the audio tokenizer, on batches of sounds of the same length."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self._directory: Path = codec_directory(model_config.model)
        self._num_channels: int = model_config.hf_config.model_config["num_channels"]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the audio tokenizer's own checkpoint; those given are the language model's, and are not read."""
        self.decoder = load_decoder(read_codec_config(self._directory), self._num_channels, self._directory)
        return {name for name, _ in self.decoder.named_parameters()}

    def read(self, args: Mapping[str, Any]) -> Tensor:
        """Codes of a request, [num_frames, channels] int64.

        Args:
            args: ``codes``, the frames' codes one after the other.

        Raises:
            ValueError: no whole number of frames, or a code outside its codebook.
        """
        codes = torch.tensor(args["codes"], dtype=torch.int64)
        if len(codes) % self._num_channels:
            raise ValueError(f"{len(codes)} codes: frames have {self._num_channels}")
        frames = codes.view(-1, self._num_channels)
        for channel, table in enumerate(self.decoder.quantizer.tables):
            column = frames[:, channel]
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < len(table):
                raise ValueError(
                    f"codes of channel {channel} must lie in [0, {len(table)}), got {column.min()}..{column.max()}"
                )
        return frames

    def generate(self, batch: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Decode sounds; pieces of the same length share a batch.

        Returns:
            For each, ``audio``: float32 [960 * num_frames].
        """
        device = next(self.decoder.parameters()).device
        pieces = [list(frames.split(FRAMES_PER_PIECE)) if len(frames) else [] for frames in batch]
        alike = defaultdict(list)
        for request, several in enumerate(pieces):
            for index, piece in enumerate(several):
                alike[len(piece)].append((request, index))
        for places in alike.values():
            codes = torch.stack([pieces[request][index] for request, index in places]).to(device)
            for (request, index), wave in zip(places, self.decoder(codes), strict=True):
                pieces[request][index] = wave
        return [{"audio": torch.cat(several) if several else torch.zeros(0)} for several in pieces]
