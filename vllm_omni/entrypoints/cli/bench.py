"""``vllm-omni bench serve``, vLLM's client under load with backends for media, and ``vllm-omni bench load``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vllm_omni.entrypoints.cli.parser import reason
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.names import suggest

COMMANDS = ("serve", "load")

HELP = """usage: vllm-omni bench COMMAND ...

commands:
  serve  vLLM's client at one rate, with backends for media; its flags are vLLM's, --media-goodput and --media-result
  load   several rates, a trace of arrivals, or two servers in turn, with a picture of rate against goodput

`vllm bench COMMAND --omni ...` is `vllm-omni bench COMMAND ...`.
"""


def bench(args: Sequence[str]) -> None:
    """Measure a running server.

    Raises:
        ConfigError: an unknown command, or a wrong argument.
        OmniError: the server cannot be reached, or rejects the first request.
    """
    command, *rest = args or ["--help"]
    if command in ("-h", "--help"):
        print(HELP, end="")
    elif command == "serve":
        bench_serve(rest)
    elif command == "load":
        from vllm_omni.entrypoints.cli.bench_load import bench_load

        bench_load(rest)
    else:
        raise ConfigError(f"bench {command}: {suggest(command, COMMANDS)}; others are vLLM's, without --omni")


def bench_serve(args: Sequence[str]) -> None:
    """Run vLLM's ``bench serve`` with our backends; its flags are vLLM's, and two of ours."""
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, OPENAI_COMPATIBLE_BACKENDS
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni.entrypoints.bench.report import TARGETS, parse_targets, summarize
    from vllm_omni.entrypoints.bench.requests import BACKENDS, MediaOutput, measured

    outputs: list[MediaOutput] = []  # those of requests that warm up included
    ASYNC_REQUEST_FUNCS.update({name: measured(send, outputs) for name, (_, send) in BACKENDS.items()})
    OPENAI_COMPATIBLE_BACKENDS.append("omni-chat")  # takes sampling parameters
    parser = FlexibleArgumentParser(prog="vllm bench serve --omni")
    add_cli_args(parser)
    group = parser.add_argument_group("Media", "What vLLM's client does not measure.")
    group.add_argument(
        "--media-goodput",
        nargs="+",
        default=[],
        metavar="NAME:VALUE",
        help=f"targets that a good request meets, in ms (rtf: a ratio): {', '.join(TARGETS)}. Example: ttfa:500 gap:50",
    )
    group.add_argument("--media-result", metavar="FILE", help="write the figures of media there, as JSON")
    options = parser.parse_args(args)
    targets = parse_targets(options.media_goodput, "--media-goodput")
    if options.backend not in BACKENDS and (targets or options.media_result):
        raise ConfigError(f"--media-goodput and --media-result need a --backend of media: {', '.join(BACKENDS)}")
    if options.backend in BACKENDS and options.endpoint == parser.get_default("endpoint"):
        options.endpoint = BACKENDS[options.backend][0]
    try:
        result = main(options)
    except (ValueError, OSError) as exc:
        raise OmniError(f"bench serve: {reason(exc)}") from exc
    if options.backend not in BACKENDS:
        return
    num_requests = result["completed"] + result["failed"]
    report = summarize(outputs[-num_requests:], targets)
    print(" Media ".center(50, "="))
    for name, value in report.items():
        print(f"{name + ':':40} {value:<10.4g}")
    print("=" * 50)
    if options.media_result:
        try:
            Path(options.media_result).write_text(json.dumps(report) + "\n")
        except OSError as exc:
            raise OmniError(f"{options.media_result}: {reason(exc)}") from exc
