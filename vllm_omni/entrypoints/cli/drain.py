"""``vllm-omni drain ENGINE`` and ``undrain ENGINE``: take an engine of a running server out of service, and back."""

import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from vllm_omni.entrypoints.cli.parser import RejectingParser, reason
from vllm_omni.errors import OmniError

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 30.0
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
    deadline = time.monotonic() + options.timeout
    while (report := _post(options, "/drain"))["num_requests"] and time.monotonic() < deadline:
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
    print(f"{options.engine}: {_post(options, '/undrain')['state']}")


def _parser(command: str, description: str) -> RejectingParser:
    parser = RejectingParser(prog=f"vllm-omni {command}", description=description)
    parser.add_argument("engine", metavar="ENGINE", help="its name on /health: talker/1")
    parser.add_argument("--url", default=URL, help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("VLLM_API_KEY"), help="one of the server's")
    return parser


def _post(options: Namespace, route: str) -> Any:
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    body = json.dumps({"engine": options.engine}).encode()
    try:
        with urlopen(Request(options.url + route, body, headers), timeout=ANSWER_TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as exc:
        raise OmniError(_message(exc)) from exc
    except (URLError, OSError, ValueError) as exc:
        raise OmniError(f"{options.url} cannot be reached: {reason(exc)}") from exc


def _message(error: HTTPError) -> str:
    """The message of the server's error, in OpenAI's shape."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error}"
