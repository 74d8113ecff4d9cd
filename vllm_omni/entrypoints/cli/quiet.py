"""Keep the output of libraries out of a command's answer."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
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


SERVER_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library.triton",  # "Triton not available", from each process on a CPU
    "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
}
"""Of a server, what ``process/logs.py`` cannot filter."""


def hush(variables: Mapping[str, str] = VARIABLES) -> None:
    """Silence libraries while they load, which would bury what a command says. Call it before vLLM is imported.

    Variables that the user has set stay as they are.
    """
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def only_the_answer_on_stdout() -> Iterator[TextIO]:
    """Yield the real stdout; the output of vLLM, its processes and their libraries goes to stderr."""
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
