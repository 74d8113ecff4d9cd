from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, ImageMetrics, MediaMetrics, MediaTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sums(metrics: MediaMetrics) -> dict[str, tuple[float, float]]:
    """Name -> number of observations, and their sum."""
    samples = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    names = [name.removesuffix("_count") for name in samples if name.endswith("_count")]
    return {name.removeprefix("vllm_omni:"): (samples[f"{name}_count"], samples[f"{name}_sum"]) for name in names}


def test_speech_is_timed_to_its_first_piece_and_to_its_end() -> None:
    metrics, clock = AudioMetrics(CollectorRegistry()), Clock()
    timer = MediaTimer(metrics, clock)
    clock.now += 0.5
    timer.piece()
    clock.now += 1.0
    timer.piece()
    clock.now += 0.5
    timer.end(duration_s=8.0)
    assert sums(metrics) == {"audio_ttfp_seconds": (1, 0.5), "audio_duration_seconds": (1, 8.0), "audio_rtf": (1, 0.25)}


def test_an_answer_without_speech_is_not_counted() -> None:
    metrics = AudioMetrics(CollectorRegistry())
    MediaTimer(metrics, Clock()).end(duration_s=0.0)
    assert set(sums(metrics).values()) == {(0, 0)}


def test_a_preview_is_the_first_picture_and_not_a_finished_one() -> None:
    metrics, clock = ImageMetrics(CollectorRegistry()), Clock()
    timer = MediaTimer(metrics, clock)
    for seconds in (0.5, 1.0):
        clock.now += seconds
        timer.piece()
    assert sums(metrics) == {"image_ttfp_seconds": (1, 0.5), "image_total_seconds": (0, 0)}
    timer.end()
    assert sums(metrics) == {"image_ttfp_seconds": (1, 0.5), "image_total_seconds": (1, 1.5)}


def test_without_metrics_nothing_is_counted() -> None:
    timer = MediaTimer(None, Clock())
    timer.piece()
    timer.end()


def test_a_starting_engine_does_not_remove_the_metrics() -> None:
    def observed() -> float | None:  # of the process's first server: other tests may have built one here
        return REGISTRY.get_sample_value("vllm_omni:audio_ttfp_seconds_count")

    metrics = AudioMetrics()
    try:
        before = observed()
        unregister_vllm_metrics()  # called by the engine when it starts
        assert before is not None and observed() == before
    finally:
        REGISTRY.unregister(metrics)
