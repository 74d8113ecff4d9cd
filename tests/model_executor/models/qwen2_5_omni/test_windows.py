import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.qwen2_5_omni.windows import Window, WindowCutter, WindowSizes

SIZES = WindowSizes(first=12, size=48, past=30, future=10)


def cut(num_codes: int, at_a_time: int, sizes: WindowSizes = SIZES) -> list[Window]:
    cutter, codes, windows = WindowCutter(sizes, block=12), list(range(num_codes)), []
    for begin in range(0, num_codes, at_a_time):
        windows += cutter.push(codes[begin : begin + at_a_time])
    return [*windows, cutter.finish()]


@pytest.mark.parametrize("num_codes", [0, 1, 12, 21, 22, 23, 200, 545])
def test_every_code_is_kept_once_in_order(num_codes: int) -> None:
    assert [code for window in cut(num_codes, 1) for code in range(*window.keep)] == list(range(num_codes))


@pytest.mark.parametrize("at_a_time", [7, 100, 545])
def test_windows_do_not_depend_on_the_arrival_of_codes(at_a_time: int) -> None:
    assert cut(545, at_a_time) == cut(545, 1)


def test_a_window_has_context_within_the_utterance() -> None:
    for window in cut(200, 1):
        first, end = window.keep
        assert window.start == max(first - 30, 0) // 12 * 12  # of whole blocks
        assert window.codec_ids == list(range(window.start, min(end + 10, 200)))


def test_chunks_grow_to_their_size() -> None:
    assert [end - first for first, end in (window.keep for window in cut(200, 1))] == [12, 24, 48, 48, 48, 20]


def test_a_window_is_cut_as_soon_as_its_future_context_has_arrived() -> None:
    cutter = WindowCutter(SIZES, block=12)
    assert not list(cutter.push(range(21)))
    assert len(list(cutter.push([21]))) == 1


def test_a_size_of_zero_is_one_window() -> None:
    assert cut(545, 1, WindowSizes(size=0)) == [Window(list(range(545)), 0, (0, 545))]


@pytest.mark.parametrize("sizes", [{"first": 0}, {"first": 97}, {"first": 12, "size": 11}])
def test_an_empty_first_chunk_and_one_longer_than_the_others_are_rejected(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"first = \d+: must lie in \[1, size"):
        WindowSizes(**sizes)
