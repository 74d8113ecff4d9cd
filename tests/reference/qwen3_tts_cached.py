"""The plain reference with caches: transformers' ``Qwen3Model`` for the talker and for the code predictor.

Same frames as ``qwen3_tts.py``, one step for each token as in the model's package, but without that package's two
nested calls of ``generate``. Benchmarks have it as their baseline; ``test_qwen3_tts_cached.py`` compares the two.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3Model

from tests.reference.qwen3_tts import NUM_GROUPS, Reference


@dataclass(frozen=True)
class Job:
    codes: Tensor  # [frames, 16]
    wave: Tensor  # [frames * 1920]
    frames_s: float  # for the frames, from the text on
    total_s: float  # and for their samples


class CachedReference(Reference):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.talker = self._model("talker.model.", self.talker_config)
        self.predictor = self._model("talker.code_predictor.model.", self.talker_config["code_predictor_config"])

    def _model(self, prefix: str, config: dict) -> Qwen3Model:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        fields = {name: config[name] for name in (*names, "head_dim", "rms_norm_eps")}
        rope = {"rope_type": "default", "rope_theta": float(config["rope_theta"])}
        model = Qwen3Model(Qwen3Config(**fields, vocab_size=1, rope_parameters=rope)).eval()
        tensors = {name.removeprefix(prefix): one for name, one in self.weights.items() if name.startswith(prefix)}
        tensors = {name: one for name, one in tensors.items() if name.startswith(("layers.", "norm."))}
        left_out = model.load_state_dict(tensors, strict=False)
        assert left_out.missing_keys == ["embed_tokens.weight"] and not left_out.unexpected_keys, left_out
        return model

    @torch.inference_mode()
    def job(self, text: str, num_frames: int, repetition_penalty: float = 1.05, **prompt: object) -> Job:
        """Greedy speech of ``num_frames`` frames; the end code is not allowed before."""
        started = time.perf_counter()
        rows, tail = self.prompt(text, **prompt)  # type: ignore[arg-type]
        pad, end = self.tts_row("pad")[0], self.talker_config["codec_eos_token_id"]
        cache = DynamicCache(config=self.talker.config)
        firsts: list[int] = []
        frames: list[Tensor] = []
        while len(frames) < num_frames:
            output = self.talker(inputs_embeds=rows[None], past_key_values=cache, use_cache=True)
            hidden = output.last_hidden_state[0, -1]
            scores = self.first_scores(hidden, firsts, repetition_penalty, end, may_end=False)
            firsts.append(int(scores.argmax()))
            frames.append(self.residual_codes(hidden, firsts[-1]))
            added = tail[len(frames) - 1] if len(frames) <= len(tail) else pad
            rows = self.frame_rows(frames[-1][None]) + added
        codes = torch.stack(frames)
        frames_s = time.perf_counter() - started
        wave = self.decode(codes)
        return Job(codes, wave, frames_s, time.perf_counter() - started)

    def residual_codes(self, hidden: Tensor, first: int) -> Tensor:
        projection = "talker.code_predictor.small_to_mtp_projection"
        cache, codes = DynamicCache(config=self.predictor.config), [first]
        rows = torch.stack([hidden, self.codec_rows([first])[0]])
        for group in range(NUM_GROUPS - 1):
            if f"{projection}.weight" in self.weights:
                rows = self.linear(projection, rows)
            output = self.predictor(inputs_embeds=rows[None], past_key_values=cache, use_cache=True)
            last = output.last_hidden_state[0, -1]
            codes.append(int(self.linear(f"talker.code_predictor.lm_head.{group}", last).argmax()))
            rows = self.predictor_table(group)[codes[-1:]]
        return torch.tensor(codes)
