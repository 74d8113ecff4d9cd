"""``vllm-omni replicas``: the engines of a running server, and of those that share its registry."""

import json
import sys
from collections.abc import Sequence

from vllm_omni.entrypoints.cli.server import ask_server, server_parser
from vllm_omni.entrypoints.cli.table import print_table

COLUMNS = ("address", "model", "engine", "state", "num_requests", "num_restarts", "reason")
HEADER = ("SERVER", "MODEL", "ENGINE", "STATE", "REQUESTS", "RESTARTS", "REASON")


def replicas(args: Sequence[str]) -> None:
    """Print one line for each engine.

    Raises:
        OmniError: the server cannot be reached.
    """
    parser = server_parser(
        "replicas", "List the engines of a running server, and of all servers with the same --replica-registry."
    )
    parser.add_argument("--json", action="store_true", help="print what the route /replicas answers")
    options = parser.parse_args(args)
    report = ask_server(options, "/replicas")
    if options.json:
        print(json.dumps(report))
        return
    rows = [
        HEADER,
        *(tuple(str(one[key] or ("" if key == "reason" else 0)) for key in COLUMNS) for one in report["replicas"]),
    ]
    print_table(rows)
    registry = report["registry"]
    if registry is not None and registry["error"] is not None:
        age = "never answered" if registry["age_s"] is None else f"other servers as of {registry['age_s']:g} s ago"
        print(f"{registry['error']}; {age}", file=sys.stderr)
