"""The second stage's model: text in, tones out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.config import VllmConfig

from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel

SAMPLE_RATE = 8000
TONE_HZ = 600.0
CODES = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
        ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.. "
        "----- .---- ..--- ...-- ....- ..... -.... --... ---.. ----.".split(),
        strict=True,
    )
)


def morse_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the stage: the checkpoint's configuration as this model reads it."""
    return GenerationConfig(architectures=["Morse"], dtype="float32")


class Morse(GenerationModel):
    """No weights: a dot lasts 60 ms, a dash three dots, the gap after a letter three, after a word seven."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        dot = torch.arange(int(SAMPLE_RATE * 0.06)) / SAMPLE_RATE
        self.signs = {".": self._tone(dot), "-": self._tone(torch.arange(3 * len(dot)) / SAMPLE_RATE)}
        self.gap = torch.zeros(len(dot))

    @staticmethod
    def _tone(seconds: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.sin(2 * torch.pi * TONE_HZ * seconds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()

    def read(self, args: Mapping[str, Any]) -> str:
        """One request, checked; what is wrong with it is raised here and fails it alone."""
        text: str = args["text"]
        return text.upper()

    def generate(self, batch: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """A batch of requests. A model with weights would pad them, and run once."""
        return [{"audio": torch.cat([torch.zeros(0), *map(self._key, text)])} for text in batch]

    def _key(self, letter: str) -> torch.Tensor:
        if letter == " ":
            return self.gap.repeat(4)  # with the three after the letter before it
        if letter not in CODES:
            return torch.zeros(0)
        signs = [part for sign in CODES[letter] for part in (self.signs[sign], self.gap)]
        return torch.cat([*signs, self.gap, self.gap])
