"""``vllm-omni drain ENGINE`` and ``undrain ENGINE``: take an engine of a running server out of service, and back."""

import time
from collections.abc import Sequence

from vllm_omni.entrypoints.cli.parser import RejectingParser
from vllm_omni.entrypoints.cli.server import ask_server, server_parser
from vllm_omni.errors import OmniError

TIMEOUT_S = 600.0
POLL_S = 0.5


def drain(args: Sequence[str]) -> None:
    """Drain an engine, and wait until no request runs there.

    Raises:
        OmniError: the server cannot be reached or rejects it, or requests still run there after the time-out.
    """
    parser = _parser(
        "drain",
        "Give an engine of a running server no new requests, and wait for those that run there; other engines of its "
        "stage get them, until `vllm-omni undrain ENGINE`.",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=TIMEOUT_S, help="limit of the wait (default: %(default)g)"
    )
    options = parser.parse_args(args)
    body = {"engine": options.engine}
    deadline = time.monotonic() + options.timeout
    while (report := ask_server(options, "/drain", body))["num_requests"] and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if report["num_requests"]:
        raise OmniError(f"{options.engine}: {report['num_requests']} requests still run after {options.timeout:g} s")
    print(f"{options.engine}: {report['state']}")


def undrain(args: Sequence[str]) -> None:
    """Give a drained engine requests again.

    Raises:
        OmniError: the server cannot be reached, or rejects it.
    """
    options = _parser("undrain", "Give an engine that was drained requests again.").parse_args(args)
    report = ask_server(options, "/undrain", {"engine": options.engine})
    print(f"{options.engine}: {report['state']}")


def _parser(command: str, description: str) -> RejectingParser:
    parser = server_parser(command, description)
    parser.add_argument("engine", metavar="ENGINE", help="its name on /health: talker/1")
    return parser
