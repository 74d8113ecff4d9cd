"""Histograms of speech and images as the server sees them: from a request's arrival to the parts of its answer."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Histogram, Metric
from prometheus_client.registry import Collector

SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60)
LENGTHS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
FACTORS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)


class MediaMetrics(Collector):
    """Metrics registered as one collector, beside those of the stages (``engine/metrics.py``).

    Registered one by one they would be lost: a starting vLLM engine removes every metric with "vllm" in its name from
    the registry of the process.
    """

    ttfp: Histogram  # seconds from a request to the first part of its answer

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = CollectorRegistry()
        registry.register(self)

    @abstractmethod
    def observe_end(self, seconds: float, duration_s: float) -> None:
        """Count an answer that took ``seconds``; its sound lasts ``duration_s``."""

    def histogram(self, name: str, what: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"vllm_omni:{name}", what, buckets=buckets, registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


class AudioMetrics(MediaMetrics):
    """Metrics of answers with speech."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.ttfp = self.histogram("audio_ttfp_seconds", "Seconds from a request to the first piece of its speech.")
        self.duration = self.histogram("audio_duration_seconds", "Seconds of speech in an answer.", LENGTHS)
        self.rtf = self.histogram(
            "audio_rtf", "Real-time factor: seconds a request took, by seconds of speech.", FACTORS
        )

    def observe_end(self, seconds: float, duration_s: float) -> None:
        if duration_s:  # an answer without speech is not counted
            self.duration.observe(duration_s)
            self.rtf.observe(seconds / duration_s)


class ImageMetrics(MediaMetrics):
    """Metrics of answers with images."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.ttfp = self.histogram(
            "image_ttfp_seconds", "Seconds from a request to its first picture: a preview, or a finished one."
        )
        self.total = self.histogram("image_total_seconds", "Seconds from a request to all of its finished pictures.")

    def observe_end(self, seconds: float, duration_s: float) -> None:
        self.total.observe(seconds)


class MediaTimer:
    """Measures one answer, from its construction on.

    Args:
        metrics: where the times are counted; None: nowhere.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: MediaMetrics | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._has_piece = False

    def piece(self) -> None:
        """Note that a piece of the answer is ready to be sent."""
        if self._metrics is not None and not self._has_piece:
            self._metrics.ttfp.observe(self._clock() - self._started_s)
        self._has_piece = True

    def end(self, duration_s: float = 0.0) -> None:
        """Note that the answer is complete; its sound lasts ``duration_s``."""
        if self._metrics is not None:
            self._metrics.observe_end(self._clock() - self._started_s, duration_s)
