from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_omni.entrypoints.openai.audio_metrics import AudioMetrics, AudioTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sums(metrics: AudioMetrics) -> dict[str, tuple[float, float]]:
    """Name -> how many answers, and their sum."""
    samples = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    names = ("audio_ttfp_s", "audio_duration_s", "audio_rtf")
    return {name: (samples[f"vllm_omni:{name}_count"], samples[f"vllm_omni:{name}_sum"]) for name in names}


def test_an_answer_is_timed_to_its_first_piece_and_to_its_end() -> None:
    metrics, clock = AudioMetrics(CollectorRegistry()), Clock()
    timer = AudioTimer(metrics, clock)
    clock.now += 0.5
    timer.piece()
    clock.now += 1.0
    timer.piece()
    clock.now += 0.5
    timer.end(duration_s=8.0)
    assert sums(metrics) == {"audio_ttfp_s": (1, 0.5), "audio_duration_s": (1, 8.0), "audio_rtf": (1, 0.25)}


def test_an_answer_without_speech_is_not_counted() -> None:
    metrics = AudioMetrics(CollectorRegistry())
    AudioTimer(metrics, Clock()).end(duration_s=0.0)
    assert set(sums(metrics).values()) == {(0, 0)}


def test_an_engine_that_starts_does_not_take_them_out() -> None:
    metrics = AudioMetrics()
    try:
        unregister_vllm_metrics()  # as it does
        assert REGISTRY.get_sample_value("vllm_omni:audio_ttfp_s_count") == 0
    finally:
        REGISTRY.unregister(metrics)
