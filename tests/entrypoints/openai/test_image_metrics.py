from prometheus_client import CollectorRegistry

from vllm_omni.entrypoints.openai.image_metrics import ImageMetrics, ImageTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sums(metrics: ImageMetrics) -> dict[str, tuple[float, float]]:
    """Name -> how many answers, and their sum."""
    samples = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    names = ("image_ttfp_s", "image_total_s")
    return {name: (samples[f"vllm_omni:{name}_count"], samples[f"vllm_omni:{name}_sum"]) for name in names}


def test_a_preview_is_the_first_picture_and_no_finished_one() -> None:
    metrics, clock = ImageMetrics(CollectorRegistry()), Clock()
    timer = ImageTimer(metrics, clock)
    clock.now += 0.5
    timer.picture(is_finished=False)
    clock.now += 1.0
    timer.picture(is_finished=False)
    assert sums(metrics) == {"image_ttfp_s": (1, 0.5), "image_total_s": (0, 0)}
    timer.picture(is_finished=True)
    assert sums(metrics) == {"image_ttfp_s": (1, 0.5), "image_total_s": (1, 1.5)}


def test_a_picture_without_a_preview_is_both() -> None:
    metrics, clock = ImageMetrics(CollectorRegistry()), Clock()
    timer = ImageTimer(metrics, clock)
    clock.now += 2.0
    timer.picture(is_finished=True)
    assert sums(metrics) == {"image_ttfp_s": (1, 2.0), "image_total_s": (1, 2.0)}


def test_nothing_is_told_where_there_are_no_metrics() -> None:
    ImageTimer(None, Clock()).picture(is_finished=True)
