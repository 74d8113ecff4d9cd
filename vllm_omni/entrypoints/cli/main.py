"""``vllm-omni COMMAND ...``; ``vllm serve MODEL --omni ...`` calls ``main`` with the same arguments.

Each command imports its modules when it is called: help, wrong commands and ``tiny`` need no vLLM.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

from vllm_omni import __version__
from vllm_omni.compat import require_vllm
from vllm_omni.entrypoints.cli.quiet import SERVER_VARIABLES, hush
from vllm_omni.errors import ConfigError, MissingDependency, OmniError
from vllm_omni.names import suggest

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "generate": "answer one prompt, media included, without a server",
    "bench": "measure a running server under load: texts, speech, images and videos; compare two servers",
    "config": "show a model's deployment, and the origin of each value",
    "plan-memory": "print how the stages would share the memory of their devices",
    "replicas": "list the engines of running servers, and their load",
    "drain": "give an engine or a host of a running server no new requests, other engines get them",
    "undrain": "give it requests again",
    "scale": "start or end replicas of the stages of a running server",
    "trace": "show where the time of a request of a running server went",
    "cache": "list, verify or remove the KV pages that engines keep on this host",
    "graph": "print the graph of a model, or of a Python file, and check it",
    "doctor": "check whether this machine can serve, and what is missing",
    "tiny": "write a tiny random checkpoint of a model type, for tests and demonstrations",
}

NEED_VLLM = ("serve", "generate", "plan-memory", "bench")
QUIET = ("generate", "config", "graph", "plan-memory")  # without the log lines of libraries

HELP = f"""usage: vllm-omni COMMAND ...

A server for any-to-any models, as a plugin of vLLM.

commands:
{"".join(f"  {name:<13}{text}" + chr(10) for name, text in COMMANDS.items())}
options:
  -h, --help     this text; vllm-omni COMMAND --help for a command's own
  -v, --version  the version

`vllm serve MODEL --omni ...` is `vllm-omni serve MODEL ...`.
"""

INFORMATION = dict.fromkeys(("-h", "--help"), HELP) | dict.fromkeys(("-v", "--version"), f"{__version__}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: the arguments without the program's name; those of the process by default.

    Raises:
        SystemExit: 2 for wrong arguments or configuration, 1 for a later failure; one line on stderr gives the reason.
    """
    args = [arg for arg in (sys.argv[1:] if argv is None else argv) if arg != "--omni"]
    command, *rest = args or ["--help"]
    if command in INFORMATION:
        print(INFORMATION[command], end="")
        return
    try:
        with _interruptible():
            _run(command, rest)
    except OmniError as exc:
        _fail(str(exc), code=2 if isinstance(exc, ConfigError | MissingDependency) else 1)
    except KeyboardInterrupt:
        _fail("interrupted", code=130)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at Ctrl-C, even where a library makes another error of it, as pydantic does while a
    class is being defined.
    """
    was_interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in the background of a shell
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as exc:
        if was_interrupted:
            raise KeyboardInterrupt from exc
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: str, args: list[str]) -> None:
    """Call the function of the command's name, in its module."""
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}: {suggest(command, [*COMMANDS, '--help', '--version'])}")
    if command in QUIET:
        hush()
    elif command == "serve":
        hush(SERVER_VARIABLES)
    if command in NEED_VLLM:
        require_vllm(f"vllm-omni {command}")
    name = command.replace("-", "_")
    getattr(import_module(f"vllm_omni.entrypoints.cli.{name}"), name)(args)


def _fail(message: str, code: int) -> None:
    print(f"vllm-omni: error: {message}", file=sys.stderr)
    raise SystemExit(code)
