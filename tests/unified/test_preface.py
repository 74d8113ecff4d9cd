"""What a request writes in front of its picture."""

import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.unified.preface import Preface, masked

STOP, END, EOS, ANSWER, START = 3, 4, 5, 6, 7
RECAPTION = Preface((STOP, END, EOS), (END,), (END,), (ANSWER, START))
THOUGHT = Preface((STOP, END, EOS), (END,), (), (ANSWER, START))


@pytest.mark.parametrize(
    ("preface", "last", "is_cut", "expected"),
    [
        (RECAPTION, END, False, ((), (END, ANSWER, START))),
        (RECAPTION, EOS, False, ((), (END, ANSWER, START))),
        (RECAPTION, 50, True, ((50,), (END, ANSWER, START))),
        (THOUGHT, END, False, ((), (END, ANSWER, START))),
        (THOUGHT, EOS, False, ((), (ANSWER, START))),
        (THOUGHT, 50, True, ((50,), (ANSWER, START))),
    ],
)
def test_a_text_ends_with_a_token_that_stays_or_with_another(
    preface: Preface, last: int, is_cut: bool, expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert preface.ends_with(last) != is_cut
    assert preface.tail(last, is_cut=is_cut) == expected


def test_a_token_that_is_no_size_means_the_default() -> None:
    preface = Preface(first_size=20, grids=((1, 4), (2, 2), (4, 1)), default_size=1)
    assert [preface.size_of(token) for token in (19, 20, 21, 22, 23)] == [1, 0, 1, 2, 1]
    assert preface.num_more_tokens == 1


def test_tokens_are_masked_in_place() -> None:
    assert masked([1, 2, 3, 4, 5, 6], [(1, 3), (5, 6)], 9) == [1, 9, 9, 4, 5, 9]


def test_a_preface_has_a_text_or_a_size() -> None:
    with pytest.raises(InvalidRequest, match="a text or chooses a size"):
        Preface(behind=(1,))
