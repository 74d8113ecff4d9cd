"""Ask a running server: the flags of the commands that do, and its answers."""

import json
import os
from argparse import Namespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from vllm_omni.entrypoints.cli.parser import RejectingParser, reason
from vllm_omni.errors import OmniError

URL = "http://127.0.0.1:8000"
ANSWER_TIMEOUT_S = 30.0


def server_parser(command: str, description: str) -> RejectingParser:
    """The parser of a command that asks a server."""
    parser = RejectingParser(prog=f"vllm-omni {command}", description=description)
    parser.add_argument("--url", default=URL, help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("VLLM_API_KEY"), help="one of the server's")
    return parser


def ask_server(options: Namespace, route: str, body: dict[str, Any] | None = None) -> Any:
    """GET a route, or POST a body to it, and return the answer.

    Raises:
        OmniError: the server cannot be reached, or answers with an error.
    """
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(options.url + route, data, headers), timeout=ANSWER_TIMEOUT_S) as response:
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
