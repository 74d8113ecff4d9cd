"""How a stream of sound would have been heard."""

import io

import numpy as np
import pytest
import soundfile

from vllm_omni.entrypoints.bench.playback import Playback, WavStream


def test_sound_that_arrives_in_time_has_no_gap() -> None:
    playback = Playback()
    for at in (1.0, 1.4, 1.4, 2.3):
        playback.add(0.5, at)
    assert (playback.first_at, playback.seconds, playback.gaps) == (1.0, 2.0, [])
    assert playback.is_continuous(0.0)


def test_late_sound_is_a_gap_that_moves_what_follows() -> None:
    playback = Playback()
    for at in (1.0, 1.75, 2.25, 3.0):
        playback.add(0.5, at)
    assert playback.gaps == [0.25, 0.25]
    assert playback.is_continuous(0.25) and not playback.is_continuous(0.2)


def test_without_sound_nothing_is_continuous() -> None:
    playback = Playback()
    playback.add(0.0, 1.0)
    assert playback.first_at is None
    assert not playback.is_continuous(10.0)


@pytest.mark.parametrize("size", [7, 44, 1000, 10**6])
def test_pieces_of_a_wav_file_are_as_long_as_the_whole(size: int) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(12_000), 24_000, format="WAV", subtype="PCM_16")
    data, stream = file.getvalue(), WavStream()
    assert sum(stream.add(data[start : start + size]) for start in range(0, len(data), size)) == pytest.approx(0.5)


def test_what_is_no_wav_file_is_rejected() -> None:
    with pytest.raises(ValueError, match="not a WAV file"):
        WavStream().add(b"ID3" + bytes(100))
