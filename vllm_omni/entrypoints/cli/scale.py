"""``vllm-omni scale STAGE=REPLICAS``: start or end replicas of a running server's stages."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni.entrypoints.cli.server import ask_server, server_parser
from vllm_omni.entrypoints.cli.table import print_table
from vllm_omni.errors import OmniError

POLL_S = 0.5
HEADER = ("STAGE", "REPLICAS", "TARGET", "MAX", "PROPOSED")


def scale(args: Sequence[str]) -> None:
    """Have replicas started or ended, and wait until they are; without arguments, print what there is.

    Raises:
        OmniError: the server cannot be reached, rejects it, or a replica does not start or end.
    """
    parser = server_parser(
        "scale",
        "Start or end replicas of stages of a running server, of those that were started with max_replicas, and wait "
        "until there are so many. A replica that ends is drained first. Without arguments: list them.",
    )
    parser.add_argument("targets", metavar="STAGE=REPLICAS", nargs="*", type=_target, help="talker=3")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="how long a replica that is to end may have requests; then it stays (default: the server's, 600)",
    )
    options = parser.parse_args(args)
    limit = {} if options.timeout is None else {"timeout_s": options.timeout}
    for stage, replicas in options.targets:
        ask_server(options, "/scale", {"stage": stage, "replicas": replicas, **limit})
    wanted = dict(options.targets)
    while True:
        report = ask_server(options, "/scale")
        stages = {one["stage"]: one for one in report["stages"]}
        if failed := [f"{name}: {stages[name]['error']}" for name in wanted if stages[name]["error"]]:
            raise OmniError("; ".join(failed))
        # Another call may have set another target meanwhile.
        if all(stages[name]["replicas"] == stages[name]["target"] for name in wanted):
            break
        time.sleep(POLL_S)
    print_table([HEADER, *(_row(one) for one in report["stages"])])


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    proposal = stage["proposal"]
    proposed = "" if proposal is None else f"{proposal['replicas']} ({proposal['reason']})"
    return stage["stage"], str(stage["replicas"]), str(stage["target"]), str(stage["max_replicas"]), proposed


def _target(text: str) -> tuple[str, int]:
    stage, _, number = text.rpartition("=")
    if not stage or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=REPLICAS, as in talker=3")
    return stage, int(number)
