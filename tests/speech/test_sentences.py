"""Where a text that arrives in pieces is cut; its pieces change nothing."""

import random

import pytest

from vllm_omni.speech.sentences import MAX_CHARACTERS, Sentences

TEXT = (
    'Hello there. How are you?  "Fine!" she said (at 3.14 p.m. or so). Dr. J. Smith paid $1.50... and left.\n'
    "A title\n\n你好。今天天气很好！「真的吗？」他问。 No end here"
)
CUT = [
    "Hello there.",
    "How are you?",
    '"Fine!"',
    "she said (at 3.14 p.m. or so).",
    "Dr. J. Smith paid $1.50...",
    "and left.",
    "A title",
    "你好。",
    "今天天气很好！",
    "「真的吗？」",
    "他问。",
    "No end here",
]


def cut(*pieces: str) -> list[str]:
    sentences = Sentences()
    return [one for piece in pieces for one in sentences.add(piece)] + sentences.finish()


def test_a_text_is_cut_at_the_ends_of_its_sentences() -> None:
    assert cut(TEXT) == CUT


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_do_not_depend_on_the_pieces(seed: int) -> None:
    choose = random.Random(seed)
    words = [choose.choice([*CUT, "one ", "x" * choose.randrange(600), ". ", "...", "\n", "。"]) for _ in range(40)]
    for text in (TEXT, "".join(words)):
        ends = sorted(choose.sample(range(len(text)), 9))
        pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert cut(*pieces) == cut(*text) == cut(text)
        assert "".join("".join(cut(text)).split()) in "".join(text.split())


def test_a_sentence_is_complete_with_the_character_behind_it() -> None:
    sentences = Sentences()
    assert sentences.add("It costs 3.") == []
    assert sentences.add("5 dollars.") == []
    assert sentences.add(" Or") == ["It costs 3.5 dollars."]
    assert sentences.finish() == ["Or"]


def test_a_text_without_ends_is_cut_at_its_spaces_and_loses_nothing() -> None:
    words = "word " * 300
    parts = cut(words)
    assert len(parts) == 4 and all(len(part) < MAX_CHARACTERS for part in parts)
    assert " ".join(parts) == words.strip()
    assert [len(part) for part in cut("x" * 1000)] == [400, 400, 200]


@pytest.mark.parametrize("text", ["", " \n\t", "...", "?! - \n"])
def test_marks_alone_are_no_sentence(text: str) -> None:
    assert cut(text) == []
