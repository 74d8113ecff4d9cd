"""What /metrics tells of speech, as the server sees it: from a request's arrival to the bytes that it sends."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from vllm_omni.entrypoints.openai.server_metrics import ServerMetrics

_LENGTHS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_FACTORS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)


class AudioMetrics(ServerMetrics):
    """Over answers with speech."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.ttfp = self._histogram("audio_ttfp_s", "Seconds from a request to the first piece of its speech.")
        self.duration = self._histogram("audio_duration_s", "Seconds of speech in an answer.", _LENGTHS)
        self.rtf = self._histogram(
            "audio_rtf", "Real-time factor: seconds a request took, by seconds of speech.", _FACTORS
        )


class AudioTimer:
    """Measures one answer.

    Args:
        metrics: where it is told; None: nowhere.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: AudioMetrics | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._has_begun = False

    def piece(self) -> None:
        """A piece of speech was made and encoded."""
        if self._metrics is not None and not self._has_begun:
            self._metrics.ttfp.observe(self._clock() - self._started)
        self._has_begun = True

    def end(self, duration_s: float) -> None:
        """All speech was made, and lasts so long; an answer without speech is not counted."""
        if self._metrics is not None and duration_s:
            self._metrics.duration.observe(duration_s)
            self._metrics.rtf.observe((self._clock() - self._started) / duration_s)
