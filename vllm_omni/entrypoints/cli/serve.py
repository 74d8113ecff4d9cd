"""``vllm-omni serve MODEL``: serve over HTTP, with vLLM's flags and ours."""

import argparse
import dataclasses
from collections.abc import Sequence

from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.logger import configure_logging_from_args

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser, parse_deployment
from vllm_omni.entrypoints.cli.dry_run import add_flags, print_placement
from vllm_omni.entrypoints.cli.headless import add_host_flags, check_host_flags, serve_headless
from vllm_omni.errors import ConfigError
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
    if parsed.args.headless:
        serve_headless(parsed)
        return
    if parsed.args.dry_run:
        print_placement(parsed)
        return
    config = parsed.load_config()
    if parsed.args.fair_api_keys:
        config = share_fairly(config)
    if parsed.args.autoscale and all(stage.max_replicas is None for stage in config.stages):
        raise ConfigError("--autoscale: no stage may have more replicas: give --stage STAGE.max_replicas=N")
    from vllm_omni.entrypoints.front_ends.run import serve_front_ends
    from vllm_omni.entrypoints.openai.app import run_server, serve_here

    has_several = parsed.args.api_server_count not in (None, 1)
    run_server(parsed.args, config, serve_front_ends if has_several else serve_here)


def share_fairly(config: OmniConfig) -> OmniConfig:
    """The deployment with stages that run the lowest priority first, as diffusion stages do anyway.

    Raises:
        ConfigError: a stage is to run requests in another order.
    """
    stages = []
    for stage in config.stages:
        args = {"scheduling_policy": "priority", **stage.engine_args}
        if stage.engine_type == "ar" and args["scheduling_policy"] != "priority":
            said = f"scheduling_policy = {args['scheduling_policy']!r}"
            raise ConfigError(f"--fair-api-keys: stage {stage.name!r} has {said}: leave it out")
        stages.append(dataclasses.replace(stage, engine_args=args) if stage.engine_type == "ar" else stage)
    return dataclasses.replace(config, stages=tuple(stages))


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
    group.add_argument(
        "--autoscale",
        action="store_true",
        help="Start and end replicas of stages with max_replicas as the load needs them; without, that is only "
        "proposed: GET /scale.",
    )
    group = parser.add_argument_group("Fairness", "How clients share the engines.")
    group.add_argument(
        "--fair-api-keys",
        action="store_true",
        help="Requests of different keys (--api-key, several) take turns, however many one of them sends. Stages "
        "then have the scheduling policy of priorities, and requests no priorities of their own.",
    )
    add_flags(parser.add_argument_group("Placement", "Plan without a start."))
    add_host_flags(parser.add_argument_group("Hosts", "Stages on other hosts: --stage NAME.host=HOST."))
    parser.own_groups = ["Omni", "Replicas", "Fairness", "Placement", "Hosts"]


def _check(parser: DeploymentParser, args: argparse.Namespace) -> None:
    """Reject features of vLLM's server that are unsupported here, and what vLLM's server rejects."""
    _check_plan(parser, args)
    if args.fair_api_keys and len(args.api_key or ()) < 2:
        parser.error("--fair-api-keys: needs keys to be fair to: --api-key KEY KEY ...")
    check_host_flags(parser, args)
    if args.grpc or args.grpc_port is not None:
        parser.error("--grpc, --grpc-port: not with --omni; it serves HTTP")
    if args.api_server_count is not None:
        _check_front_ends(parser, args.api_server_count)
    validate_parsed_serve_args(args)


def _check_plan(parser: DeploymentParser, args: argparse.Namespace) -> None:
    given = [
        flag for flag in ("--device-memory", "--inventory") if getattr(args, flag[2:].replace("-", "_")) is not None
    ]
    if given and not args.dry_run:
        parser.error(f"{given[0]}: a plan's, with --dry-run; a start uses the devices that it finds")
    if len(given) > 1:
        parser.error("--device-memory: cannot be combined with --inventory, which has the memory of each device")


def _check_front_ends(parser: DeploymentParser, number: int) -> None:
    if number < 1:
        parser.error(f"--api-server-count {number}: must be at least 1")
    if number > 1 and envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        said = "adapters that one front end is given are unknown to the others"
        parser.error(f"--api-server-count: not with VLLM_ALLOW_RUNTIME_LORA_UPDATING: {said}; name them at the start")
