"""``vllm-omni serve MODEL``: serve over HTTP, with vLLM's flags and ours."""

import argparse
from collections.abc import Sequence

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.logger import configure_logging_from_args

from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser, parse_deployment
from vllm_omni.entrypoints.cli.plan_memory import add_device_flag, print_plan
from vllm_omni.process.logs import enter_front_end

DESCRIPTION = """Serve an any-to-any model over HTTP, with OpenAI's API. Every flag of `vllm serve` is a flag of this
command; engine flags go to the stages that they concern, --stage and --stage-overrides to one stage."""


def serve(args: Sequence[str]) -> None:
    """Parse, start every stage, serve until SIGINT or SIGTERM.

    Raises:
        SystemExit: a flag is wrong.
        ConfigError, StageFailed: the deployment is wrong, or a stage did not start.
    """
    enter_front_end()
    parsed = parse_serve_args(args)
    configure_logging_from_args(parsed.args)
    if parsed.args.dry_run:
        print_plan(parsed)
        return
    config = parsed.load_config()
    from vllm_omni.entrypoints.openai.app import run_server

    run_server(parsed.args, config)


def parse_serve_args(args: Sequence[str]) -> Deployment:
    """Parse the arguments of ``serve``; exit with code 2 if they are wrong."""
    return parse_deployment(
        "serve",
        args,
        _add_arguments,
        _check,
        description=DESCRIPTION,
        usage="vllm-omni serve MODEL [options]  (or: vllm serve MODEL --omni [options])",
    )


def _add_arguments(parser: DeploymentParser) -> None:
    make_arg_parser(parser)
    group = parser.add_argument_group("Replicas", "What several servers know of each other.")
    group.add_argument(
        "--replica-registry",
        metavar="redis://HOST:PORT/DB",
        help="A Redis server in which servers publish the state of their engines for each other: GET /replicas.",
    )
    group = parser.add_argument_group("Memory", "Plan without a start.")
    group.add_argument(
        "--dry-run", action="store_true", help="Print how the stages would share memory, as `vllm-omni plan-memory`."
    )
    add_device_flag(group)
    parser.own_groups = ["Omni", "Replicas", "Memory"]


def _check(parser: DeploymentParser, args: argparse.Namespace) -> None:
    """Reject features of vLLM's server that are unsupported here, and what vLLM's server rejects."""
    if args.device_memory is not None and not args.dry_run:
        parser.error("--device-memory: a plan's, with --dry-run; a start uses the devices that it finds")
    if args.headless:
        parser.error("--headless: not with --omni; the stages run beside the server")
    if args.grpc or args.grpc_port is not None:
        parser.error("--grpc, --grpc-port: not with --omni; it serves HTTP")
    if args.api_server_count not in (None, 1):
        count = f"--api-server-count {args.api_server_count}"
        parser.error(f"{count}: not with --omni; one process serves and routes, give 1")
    validate_parsed_serve_args(args)
