"""``SpeechGroups``: what turns groups of codes into rows of the language model, and its hidden states into groups.

A group is four frames of eight codes, and one position of the language model. A row is what the patch encoder makes of
the group's codes. The local transformer makes the codes, eleven steps for a group: channel c has its frame f at step
f + delay[c], so several channels may be sampled in one step. Neither keeps anything between groups.

Names of parameters are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm_omni.model_executor.models.mimo_audio.config import SpeechConfig
from vllm_omni.speech.code_predictor import FrameTransformer
from vllm_omni.speech.few_rows import FewRowsLinear, prepare
from vllm_omni.speech.frame_graphs import FrameGraphs
from vllm_omni.speech.residual_sampling import SamplingBatch


class SpeechGroups(nn.Module):
    def __init__(self, config: SpeechConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        patch, local = config.patch.hidden_size, config.local.hidden_size
        self.speech_embeddings = nn.ModuleList(nn.Embedding(size, patch) for size in config.sizes)
        self.input_local_transformer = FrameTransformer(config.patch)
        self.speech_group_downcast = nn.Linear(config.group_size * patch, hidden_size, bias=False)
        self.hidden_states_downcast = FewRowsLinear(hidden_size, local, bias=False)
        self.local_transformer = FrameTransformer(config.local)
        self.local_transformer_lm_heads = nn.ModuleList(FewRowsLinear(local, size, bias=False) for size in config.sizes)
        self.speech_embeddings_to_local = FewRowsLinear(patch, local, bias=False) if patch != local else nn.Identity()
        num_draws = config.group_size * config.num_channels
        self._groups = FrameGraphs(self._generate, num_draws, max(config.sizes))

    def rows(self, codes: Tensor) -> Tensor:
        """Rows of groups: [n, group_size, channels] int64 -> [n, hidden_size]."""
        frames = torch.stack([self._embed(codes[..., channel], channel) for channel in range(codes.shape[-1])]).sum(0)
        encoder = self.input_local_transformer
        encoded = encoder.advance(frames, encoder.new_cache(frames), 0)
        return self.speech_group_downcast(encoded.flatten(1))

    def _embed(self, codes: Tensor, channel: int) -> Tensor:
        """Rows of one channel's codes; 0 for the empty one, whatever is stored."""
        rows = self.speech_embeddings[channel](codes)
        return rows * (codes != self.config.empty_ids[channel])[..., None]

    def generate(self, hidden_states: Tensor, sampling: SamplingBatch) -> Tensor:
        """Generate a group of each request: [B, hidden_size] -> [B, group_size, channels] int64."""
        return self._groups((hidden_states,), sampling)

    def _generate(self, inputs: Sequence[Tensor], sampling: SamplingBatch, noise: Tensor | None) -> Tensor:
        (hidden_states,) = inputs
        config, transformer = self.config, self.local_transformer
        num_rows, num_channels = len(hidden_states), config.num_channels
        codes = torch.zeros(num_rows, config.group_size, num_channels, dtype=torch.int64, device=hidden_states.device)
        x, cache = self.hidden_states_downcast(hidden_states), transformer.new_cache(hidden_states)
        for step in range(config.local.num_code_groups):
            y = transformer.advance(x[:, None], cache, step)[:, 0]
            embedded = []
            for channel, delay in enumerate(config.delays):
                frame = step - delay
                if 0 <= frame < config.group_size:
                    draw = None if noise is None else noise[frame * num_channels + channel, :, : config.sizes[channel]]
                    code = self._sample(y, channel, sampling, draw)
                    codes[:, frame, channel] = code
                    embedded.append(self.speech_embeddings[channel](code))
            if embedded:
                x = self.speech_embeddings_to_local(torch.stack(embedded).sum(0))
            else:  # no channel has this delay
                x = torch.zeros_like(x)
        return codes

    def compile_frames(self, max_rows: int) -> None:
        """See ``CodePredictor``."""
        self.local_transformer.compile_pass()
        prepare(*self.local_transformer_lm_heads, self.hidden_states_downcast, self.speech_embeddings_to_local)
        row = self.hidden_states_downcast.weight.new_zeros(1, self.hidden_states_downcast.in_features)
        self._groups.prepare((row,), max_rows)

    def _sample(self, y: Tensor, channel: int, sampling: SamplingBatch, noise: Tensor | None) -> Tensor:
        logits = self.local_transformer_lm_heads[channel](y)
        # Before top k and top p: the original removes it after them, when nothing else may be left.
        logits[:, self.config.empty_ids[channel]] = float("-inf")
        return sampling.sample(logits, noise)
