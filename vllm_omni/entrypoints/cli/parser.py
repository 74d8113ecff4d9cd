"""What every parser of the command line does: refuse in one line, with the nearest valid name."""

import argparse
import difflib
from collections.abc import Collection
from typing import NoReturn

from vllm_omni.names import suggest


class RefusingParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, exit code 2, and name what was probably meant."""

    options: Collection[str] | None = None  # what to compare an unknown flag with; this parser's own by default

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [self._unknown(word) for word in unknown.split() if word.startswith("-")]
            message = "; ".join(flags) or f"unexpected argument {unknown!r}"
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, self.options or self._option_string_actions, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"see {self.prog} --help"
        return f"unknown flag {flag!r}: {hint}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"invalid value {value!r}: {suggest(str(value), choices)}")
