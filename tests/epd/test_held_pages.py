"""What instances are believed to hold."""

import pytest

from vllm_omni.config.epd import Tasks
from vllm_omni.epd.held_pages import PAGE_TOKENS, SLACK_TOKENS, Content, HeldPages, content_of
from vllm_omni.messages.token_names import Part, TokenNames

SLACK = SLACK_TOKENS // PAGE_TOKENS


def make_names(num_pages: int, *parts: Part, first: int = 0, salt: str = "") -> TokenNames:
    return TokenNames([first, *range(1, num_pages * PAGE_TOKENS)], list(parts), salt)


def pages(num_pages: int, first: int = 0) -> Content:
    return content_of(make_names(num_pages, first=first), Tasks.PD)


# -- what a request has ------------------------------------------------------------------------------------------------


def test_content_of_an_encode_is_its_images() -> None:
    names = make_names(3, Part(5, 20, "image:a"), Part(70, 30, "image:b"))
    assert content_of(names, Tasks.E) == ([("image", "image:a"), ("image", "image:b")], [20, 30], False)


@pytest.mark.parametrize("tasks", [Tasks.P, Tasks.PD, Tasks.EP, Tasks.EPD])
def test_content_of_a_prefill_is_its_full_pages(tasks: Tasks) -> None:
    ids = make_names(3).token_ids
    content = content_of(TokenNames(ids[:-1]), tasks)
    assert content.sizes == [PAGE_TOKENS] * 2 and content.is_chain
    assert content_of(TokenNames(ids), tasks).keys[:2] == content.keys


def test_a_decode_and_a_request_without_names_have_none() -> None:
    assert not content_of(make_names(3), Tasks.D).keys
    assert not content_of(None, Tasks.EPD).keys


def test_another_image_is_another_prefix_from_the_page_in_which_it_starts() -> None:
    one, two = (content_of(make_names(3, Part(PAGE_TOKENS, 9, f"image:{name}")), Tasks.PD).keys for name in "ab")
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two)


def test_pages_differ_by_salt_from_the_first_on() -> None:
    one, two = (content_of(make_names(3, salt=salt), Tasks.PD).keys for salt in ("", "tenant"))
    assert not set(one) & set(two)


# -- what an instance holds --------------------------------------------------------------------------------------------


def test_a_chain_is_held_up_to_the_first_page_that_is_not() -> None:
    held = HeldPages()
    held.note_given("a", pages(3))
    assert held.num_tokens("a", pages(5)) == 3 * PAGE_TOKENS
    assert held.num_tokens("a", Content([0, *pages(3).keys], [1] * 4, is_chain=True)) == 0
    assert held.num_tokens("a", Content([0, *pages(3).keys], [1] * 4, is_chain=False)) == 3
    assert held.num_tokens("b", pages(5)) == 0


def test_an_instance_that_terminates_holds_nothing_and_others_what_they_held() -> None:
    held = HeldPages()
    for name in "ab":
        held.note_computed(name, pages(3))
    held.forget("a")
    assert [held.num_tokens(name, pages(3)) for name in "ab"] == [0, 3 * PAGE_TOKENS]


def test_the_ends_of_chains_are_forgotten_first() -> None:
    held = HeldPages(max_pages=8)
    held.note_computed("a", pages(5))
    held.note_computed("a", pages(5, first=9))
    assert held.num_tokens("a", pages(5)) == 3 * PAGE_TOKENS
    assert held.num_tokens("a", pages(5, first=9)) == 5 * PAGE_TOKENS


def test_only_so_many_pages_are_remembered() -> None:
    held = HeldPages(max_pages=100)
    for number in range(300):
        held.note_given("a", pages(3, first=number))
        held.note_computed("a", pages(3, first=number))
    assert sum(held.num_tokens("a", pages(3, first=number)) for number in range(300)) == 100 * PAGE_TOKENS


def test_what_was_used_before_an_evicted_page_has_gone_as_well() -> None:
    held, long = HeldPages(), pages(3 * SLACK)
    for content in (pages(4, first=1), long, pages(4, first=2)):
        held.note_computed("a", content)
    held.note_found("a", long, 2 * PAGE_TOKENS)
    assert held.num_tokens("a", pages(4, first=1)) == 0
    assert 0 < held.num_tokens("a", long) <= (2 + SLACK) * PAGE_TOKENS
    assert held.num_tokens("a", pages(4, first=2)) == 4 * PAGE_TOKENS


def test_an_engine_may_find_a_little_less() -> None:
    """It finds whole blocks, of more tokens than a page, and computes at least the last token."""
    held, long = HeldPages(), pages(2 * SLACK)
    held.note_computed("a", long)
    held.note_found("a", long, 2 * SLACK * PAGE_TOKENS - SLACK_TOKENS)
    assert held.num_tokens("a", long) == 2 * SLACK * PAGE_TOKENS


def test_pages_that_are_still_being_computed_are_not_evicted() -> None:
    """Two requests with one prompt at once: the second finds nothing yet."""
    held, long = HeldPages(), pages(3 * SLACK)
    held.note_computed("a", pages(4, first=1))
    for _ in range(2):
        held.note_given("a", long)
    held.note_found("a", long, 0)
    assert held.num_tokens("a", pages(4, first=1)) == 4 * PAGE_TOKENS
    assert held.num_tokens("a", long) == 3 * SLACK * PAGE_TOKENS
