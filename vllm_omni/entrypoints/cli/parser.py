"""Errors of the command line: one line, with the nearest valid name."""

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from vllm_omni.names import nearest, suggest


class RejectingParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, with exit code 2 and the name that was probably meant."""

    options: Collection[str] | None = None  # valid flags for suggestions; None: this parser's own
    _words: Sequence[str] = ()  # the command line

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        words = [word for word in self._words if word.startswith("--") and not self._is_known(word)]
        unexpected = message.removeprefix("unrecognized arguments: ")
        if unexpected != message:
            words = words or [word for word in unexpected.split() if word.startswith("-")]
            message = f"unexpected argument {unexpected!r}"
        # A flag that is unknown may cause any other error: its value is taken for another argument.
        self.exit(2, f"{self.prog}: error: {'; '.join(map(self._unknown, words)) or message}\n")

    def _is_known(self, word: str) -> bool:
        flag = re.split(r"[=.]", word)[0].replace("_", "-")  # vLLM's parser has dotted flags, and underscores
        return any(known.startswith(flag) for known in self.options or self._option_string_actions)

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        near = nearest(flag, self.options or self._option_string_actions)
        hint = f"see {self.prog} --help" if near is None else f"did you mean {near!r}?"
        return f"unknown flag {flag!r}: {hint}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"invalid value {value!r}: {suggest(str(value), choices)}")


def reason(exc: BaseException) -> str:
    """Describe an error in one line: the system's message for a file or a connection, or the error's first line."""
    deepest: BaseException | None = exc
    while deepest is not None:
        if isinstance(deepest, OSError) and deepest.strerror:
            return deepest.strerror
        deepest = deepest.__cause__ or deepest.__context__
    line = (str(exc).strip() or type(exc).__name__).splitlines()[0]
    line = line.removeprefix("the prompt or its media cannot be read: ")
    return re.sub(r" ?<\S+ object at 0x[0-9a-f]+>", "", line)
