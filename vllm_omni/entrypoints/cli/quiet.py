"""Keeps what libraries say out of a command's answer."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "OPENCV_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def hush() -> None:
    """Before vLLM is imported: what libraries say while they load drowns an answer of a few lines.

    Who wants to hear it sets these variables.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def only_the_answer_on_stdout() -> Iterator[TextIO]:
    """Yield the real stdout; what vLLM, its processes and their libraries write to theirs goes to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(saved, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
