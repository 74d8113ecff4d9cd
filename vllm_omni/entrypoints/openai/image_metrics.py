"""What /metrics tells of pictures, as the server sees it: from a request's arrival to what its user can look at."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from vllm_omni.entrypoints.openai.server_metrics import ServerMetrics


class ImageMetrics(ServerMetrics):
    """Over answers with pictures."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.ttfp = self._histogram(
            "image_ttfp_s",
            "Seconds from a request to its first picture: a preview, or a finished one.",
        )
        self.total = self._histogram("image_total_s", "Seconds from a request to all of its finished pictures.")


class ImageTimer:
    """Measures one answer.

    Args:
        metrics: where it is told; None: nowhere.
        clock: seconds, monotonic.
    """

    def __init__(self, metrics: ImageMetrics | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._has_begun = False

    def picture(self, *, is_finished: bool) -> None:
        """A preview came, or with ``is_finished`` all that was asked for."""
        if self._metrics is None:
            return
        seconds = self._clock() - self._started
        if not self._has_begun:
            self._metrics.ttfp.observe(seconds)
        if is_finished:
            self._metrics.total.observe(seconds)
        self._has_begun = True
