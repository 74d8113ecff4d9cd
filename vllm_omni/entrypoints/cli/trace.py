"""``vllm-omni trace [REQUEST]``: where the time of a request went."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vllm_omni.entrypoints.cli.parser import reason
from vllm_omni.entrypoints.cli.server import ask_server, server_parser
from vllm_omni.entrypoints.cli.table import print_table
from vllm_omni.errors import OmniError

HEADER = ("REQUEST", "GRAPH", "SECONDS", "STAGES", "ERROR")


def trace(args: Sequence[str]) -> None:
    """Print or write the trace of a request, or list the latest requests.

    Raises:
        OmniError: the server cannot be reached or does not know the request, or the file cannot be written.
    """
    parser = server_parser(
        "trace",
        "Where the time of a request went: its stages, their parts and the edges between them, in Chrome's format, for "
        "https://ui.perfetto.dev. Without a request, list the latest that have ended.",
    )
    parser.add_argument("request", metavar="REQUEST", nargs="?", help="its id, as in the answer: chatcmpl-...")
    parser.add_argument("--output", metavar="FILE", help="write it there instead of printing it")
    options = parser.parse_args(args)
    if options.request is None:
        if options.output is not None:
            parser.error("--output needs a REQUEST")
        print_table([HEADER, *map(_row, ask_server(options, "/traces")["requests"])])
        return
    text = json.dumps(ask_server(options, f"/traces/{quote(options.request, safe='')}"))
    if options.output is None:
        print(text)
        return
    try:
        Path(options.output).write_text(text)
    except OSError as exc:
        raise OmniError(f"{options.output}: {reason(exc)}") from exc


def _row(request: dict[str, Any]) -> tuple[str, ...]:
    stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in request["stages"].items())
    return request["id"], request["graph"], f"{request['seconds']:.3f}", stages, request["error"] or ""
