"""The code in the documents, for the tests that run it."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("make", "pip", "python", "vllm", "vllm-omni", "curl", "echo")


class Block(NamedTuple):
    """A fenced block."""

    document: str  # its name
    line: int
    language: str  # "" for a command or an output
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command in a block of commands; continued lines are joined, comments left out."""
        if self.language or not self.text.startswith(PROGRAMS):
            return []
        return [words for line in _logical_lines(self.text) if (words := shlex.split(line, comments=True))]

    @property
    def is_program(self) -> bool:
        """Whether it is a complete program in Python, rather than an excerpt."""
        return self.language == "python" and bool(re.match("(from|import) ", self.text))


def read_blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document.name, text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    ]


def _logical_lines(text: str) -> list[str]:
    """A quoted argument may hold newlines, and a backslash joins two lines."""
    lines: list[str] = []
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # a quotation is still open
            continue
        lines.append(pending)
        pending = ""
    assert not pending, f"unfinished command: {pending}"
    return lines
