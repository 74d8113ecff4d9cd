"""The vocoder: transformers' DiT and BigVGAN, a whole utterance at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel
from vllm.config import VllmConfig

from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers
from vllm_omni.relay import Payload, Relay

WEIGHT_PREFIX = "token2wav."


def token2wav_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the vocoder stage."""
    if config.model_type != "qwen2_5_omni":  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(
        architectures=["Qwen2_5OmniToken2Wav"], model_config=config.token2wav_config.to_dict(), dtype="float32"
    )


class Qwen2_5OmniToken2Wav(GenerationModel):
    """Codec ids -> waveform at 24 kHz, always in float32 (transformers converts the vocoder before it runs it)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = Qwen2_5OmniToken2WavConfig(**model_config.hf_config.model_config)
        self.num_codes = config.dit_config.num_embeds + 1
        self.token2wav = Qwen2_5OmniToken2WavModel(config).float()
        self.speakers = load_speakers(model_config.model, model_config.revision)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        state = {
            name.removeprefix(WEIGHT_PREFIX): tensor.float()
            for name, tensor in weights
            if name.startswith(WEIGHT_PREFIX)
        }
        self.token2wav.load_state_dict(state, strict=True)
        return {WEIGHT_PREFIX + name for name in state}

    def generate(self, args: Mapping[str, Any], relay: Relay, request_id: str) -> Payload:
        """Decode one utterance.

        Args:
            args: ``codec_ids`` (list[int], without the end token), ``speaker`` (name), ``seed`` (int or None: seeds
                the noise exactly as ``torch.manual_seed(seed)`` before transformers' own call).

        Returns:
            Tensor ``audio``: float32 [num_samples], 480 samples per code; empty for no codes.

        Raises:
            ValueError: a code outside the codebook, or more codes than the DiT has positions.
        """
        codec_ids = args["codec_ids"]
        if not codec_ids:
            return Payload({"audio": relay.put(request_id, torch.zeros(0))})
        if not 0 <= min(codec_ids) <= max(codec_ids) < self.num_codes:
            raise ValueError(f"codec ids must lie in [0, {self.num_codes}), got {min(codec_ids)}..{max(codec_ids)}")
        speaker = self.speakers[args["speaker"]]
        device = next(self.token2wav.parameters()).device
        codes = torch.tensor([codec_ids], device=device)
        # The reference draws its noise from the global generator: seed it for this call and put it back.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if args.get("seed") is not None:
                torch.manual_seed(args["seed"])
            else:
                torch.seed()
            audio = self.token2wav(
                codes, conditioning=speaker.cond.to(device), reference_mel=speaker.ref_mel.to(device)
            )
        return Payload({"audio": relay.put(request_id, audio.reshape(-1).float())})
