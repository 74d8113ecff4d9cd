"""Load the voices of a checkpoint (``spk_dict.pt``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.utils import cached_file


class Speaker(NamedTuple):
    bos_token: int  # of the thinker's vocabulary; its embedding starts the speech of this voice
    cond: torch.Tensor  # [1, enc_emb_dim] float32
    ref_mel: torch.Tensor  # [1, num_frames, mel_dim] float32


def load_speakers(model: str, revision: str | None = None) -> dict[str, Speaker]:
    """Load voices by name, in the checkpoint's order; ``model`` is a directory or a name on the hub.

    Raises:
        OSError: the checkpoint has no ``spk_dict.pt``.
    """
    path = cached_file(model, "spk_dict.pt", revision=revision)
    return {
        name: Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
        for name, entry in torch.load(path, map_location="cpu", weights_only=True).items()
    }
