"""The figures of a run."""

import pytest

from vllm_omni.entrypoints.bench.playback import Playback
from vllm_omni.entrypoints.bench.report import parse_targets, summarize
from vllm_omni.entrypoints.bench.requests import MediaOutput
from vllm_omni.errors import ConfigError


def spoken(start: float, *pieces: tuple[float, float], latency: float = 2.0) -> MediaOutput:
    """A request with pieces of sound: seconds, and when they arrived."""
    playback = Playback()
    for seconds, at in pieces:
        playback.add(seconds, at)
    return MediaOutput(success=True, start_time=start, latency=latency, ttft=0.1, playback=playback)


SMOOTH = spoken(0.0, (1.0, 0.5), (1.0, 1.0))
LATE = spoken(1.0, (1.0, 1.25), (1.0, 2.33), latency=4.0)
FAILED = MediaOutput(start_time=2.0, latency=3.0, error="HTTP 500")


def test_sound_is_summarized_by_its_start_its_gaps_and_its_rate() -> None:
    report = summarize([SMOOTH, LATE], {})
    assert report["p50_ttfa_ms"] == pytest.approx((500 + 250) / 2)
    assert report["p99_gap_ms"] == pytest.approx(80, rel=0.02)
    assert (report["c50"], report["c100"]) == (0.5, 1.0)
    assert report["p50_rtf"] == pytest.approx((1.0 + 2.0) / 2)
    assert report["audio_seconds_per_second"] == pytest.approx(4.0 / 5.0)


def test_a_request_that_failed_or_lacks_a_value_meets_no_target() -> None:
    silent = MediaOutput(success=True, start_time=0.0, latency=1.0, ttft=0.1)
    report = summarize([SMOOTH, LATE, FAILED, silent], {"ttfa": 400.0})
    assert report["media_goodput_share"] == 0.25
    assert report["media_goodput"] == pytest.approx(1 / 5.0)
    assert (report["media_completed"], report["media_failed"]) == (3, 1)
    assert summarize([SMOOTH, LATE], {"ttfa": 600.0, "gap": 50.0})["media_goodput_share"] == 0.5


def test_images_and_videos_are_counted_by_the_second() -> None:
    outputs = [MediaOutput(success=True, start_time=10.0, latency=2.0, num_images=3, num_videos=1)]
    report = summarize(outputs, {})
    assert (report["images_per_second"], report["videos_per_second"]) == (1.5, 0.5)
    assert "c50" not in report


def test_without_an_answer_there_is_no_goodput() -> None:
    assert summarize([FAILED], {"ttfa": 1.0}) == {
        "media_completed": 0,
        "media_failed": 1,
        "media_goodput": 0.0,
        "media_goodput_share": 0.0,
    }


def test_all_pauses_of_a_sound_are_added_up_beside_the_longest() -> None:
    report = summarize([spoken(0.0, (1.0, 0.5), (1.0, 1.7), (1.0, 2.8))], {})
    assert report["p50_gap_ms"] == pytest.approx(200)
    assert report["p50_pauses_ms"] == pytest.approx(300)


def test_the_first_token_is_that_of_a_text() -> None:
    text = MediaOutput(success=True, start_time=0.0, latency=2.0, ttft=0.1, generated_text="Hello")
    report = summarize([text, SMOOTH], {})
    assert report["p50_ttft_ms"] == pytest.approx(100) and report["p50_e2el_ms"] == pytest.approx(2000)
    assert "p50_ttft_ms" not in summarize([SMOOTH], {})


def test_targets_are_names_and_numbers() -> None:
    assert parse_targets(["ttfa:500", "rtf:0.5"], "--goodput") == {"ttfa": 500.0, "rtf": 0.5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gaps:500", "did you mean 'gap'"),
        ("ttfa", "must be a number above 0, as in ttfa:500"),
        ("gap:-1", "above 0"),
        ("gap:nan", "above 0"),
    ],
)
def test_wrong_targets_are_rejected(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput .*{message}"):
        parse_targets([given], "--goodput")
