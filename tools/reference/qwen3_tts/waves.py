"""Recordings that the cases of cloned voices read."""

from __future__ import annotations

import numpy as np


def make_wave(seconds: float, seed: int, rate: int = 24000) -> np.ndarray:
    """A voice-like sound: two gliding tones and some noise, float32."""
    t = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(t)) * 0.02
    tones = 0.3 * np.sin(2 * np.pi * (160 + 20 * seed) * t) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t))
    return (tones + 0.1 * np.sin(2 * np.pi * (400 + 60 * t) * t) + noise).astype(np.float32)
