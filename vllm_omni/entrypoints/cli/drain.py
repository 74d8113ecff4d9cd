"""``vllm-omni drain NAME`` and ``undrain NAME``: take an engine or a host of a running server out of service, and back.

A host's name stands for all engines that run on it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni.entrypoints.cli.parser import RejectingParser
from vllm_omni.entrypoints.cli.server import ask_server, server_parser
from vllm_omni.errors import OmniError

TIMEOUT_S = 600.0
POLL_S = 0.5


def drain(args: Sequence[str]) -> None:
    """Drain engines, wait until they are idle, and print the state of each.

    Raises:
        OmniError: the server cannot be reached or rejects it, or requests still run there after the time-out.
    """
    parser = _parser(
        "drain",
        "Give an engine of a running server, or all engines on a host, no new requests, and wait for those that run "
        "there; other engines of the same stages get them, until `vllm-omni undrain NAME`.",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=TIMEOUT_S, help="limit of the wait (default: %(default)g)"
    )
    options = parser.parse_args(args)
    deadline = time.monotonic() + options.timeout
    while True:
        engines = ask_server(options, "/drain", {"name": options.name})["engines"]
        busy = [one for one in engines if not one["is_idle"]]
        if not busy or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    _print_states(options.name, engines)
    if busy:
        raise OmniError(f"{options.name}: after {options.timeout:g} s, {', '.join(map(_why_busy, busy))}")


def undrain(args: Sequence[str]) -> None:
    """Give drained engines requests again, and print the state of each.

    Raises:
        OmniError: the server cannot be reached, or rejects it.
    """
    options = _parser("undrain", "Give a drained engine, or all engines on a host, requests again.").parse_args(args)
    _print_states(options.name, ask_server(options, "/undrain", {"name": options.name})["engines"])


def _why_busy(engine: Mapping[str, Any]) -> str:
    name, number = engine["engine"], engine["num_requests"]
    return f"{number} requests still run on {name}" if number else f"other stages still read what {name} has made"


def _print_states(name: str, engines: Sequence[Mapping[str, Any]]) -> None:
    if not engines:
        print(f"{name}: no engine runs there")
    for one in engines:
        print(f"{one['engine']}: {one['state']}")


def _parser(command: str, description: str) -> RejectingParser:
    parser = server_parser(command, description)
    parser.add_argument("name", metavar="NAME", help="of an engine or a host on /health: talker/1, box-a")
    return parser
