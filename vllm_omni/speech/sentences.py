"""``Sentences``: cut a text that arrives in pieces into sentences, which are spoken one after the other."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable

MAX_CHARACTERS = 400  # of one sentence; a longer one is cut at a space

# A sentence ends at a line's end; after its mark and the quotes and brackets that close with it, before a space; or,
# where marks are followed by no space, before anything else. The character behind is always awaited: until then, the
# mark may be part of a number or a row of marks.
END = re.compile(r"\n|[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？][。！？…]*[」』”’）】]*(?=[^。！？…」』”’）】])")

# A dot behind these is no end: a title, a single letter (an initial, "e.g."), or an abbreviation before a number.
NO_END = re.compile(r"(?:\b[^\W\d_]|\b(?:mr|mrs|ms|dr|prof|st|vs|etc|no|fig))\.$", re.IGNORECASE)


class Sentences:
    """Collects text until a sentence is complete. The cuts depend on the text, and not on its pieces."""

    def __init__(self) -> None:
        self._rest = ""

    def add(self, piece: str) -> list[str]:
        """The sentences that this piece completes, without space around them."""
        self._rest += piece
        sentences = []
        while (end := self._end()) is not None:
            sentences.append(self._rest[:end].strip())
            self._rest = self._rest[end:]
        return [one for one in sentences if one]

    def finish(self) -> list[str]:
        """What is left when the text is over: a last sentence, or none."""
        rest, self._rest = self._rest.strip(), ""
        return [rest] if _has_words(rest) else []

    def _end(self) -> int | None:
        self._rest = self._rest.lstrip()
        for found in END.finditer(self._rest, 0, MAX_CHARACTERS + 1):
            sentence = self._rest[: found.end()]
            if _has_words(sentence) and not NO_END.search(sentence):
                return found.end()
        if len(self._rest) <= MAX_CHARACTERS:
            return None
        space = self._rest.rfind(" ", 0, MAX_CHARACTERS)
        return space if space > 0 else MAX_CHARACTERS


def _has_words(text: str) -> bool:
    """Whether there is something to speak: a model makes noise of marks alone."""
    return any(character.isalnum() for character in text)


async def read_sentences(pieces: AsyncIterable[str]) -> AsyncGenerator[str, None]:
    """The sentences of a text, each as soon as it is complete."""
    sentences = Sentences()
    async for piece in pieces:
        for sentence in sentences.add(piece):
            yield sentence
    for sentence in sentences.finish():
        yield sentence
