"""``serve --headless``: run stages for a front end on another host; and the flags of both sides."""

import argparse
import signal
from typing import NoReturn

from vllm_omni.config.given_pipeline import find_pipeline
from vllm_omni.config.model import WORKER_BACKENDS
from vllm_omni.deploy.headless import serve_stages
from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser
from vllm_omni.errors import ConfigError

OWN_ARGS = ("revision",)  # engine arguments that a host gives itself: which checkpoint it has
FLAGS_OF_FRONT_END = (
    "listen worker_backend ray_address deploy_config stage_overrides epd kv_pool dry_run replica_registry".split()
)


def add_host_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="Where the hosts of stages with the key host join: an address of one interface.",
    )
    group.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="With --headless and --stage NAME: run these stages for the front end that listens there.",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="The secret that all hosts of a deployment have; readable by its owner alone.",
    )
    group.add_argument(
        "--worker-backend",
        choices=WORKER_BACKENDS,
        help="ray: the nodes of a Ray cluster run all stages; a stage's host is the name, address or id of a node.",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="Of the cluster's head; by default that of RAY_ADDRESS, or the cluster on this machine.",
    )


def check_host_flags(parser: DeploymentParser, args: argparse.Namespace) -> None:
    """Reject what does not go together on a front end, or on a host that joins one."""
    check = _check_host if args.headless else _check_front_end
    check(parser, args)


def _check_front_end(parser: DeploymentParser, args: argparse.Namespace) -> None:
    has_ray = args.worker_backend == "ray"
    wrong = {
        "--join: a host's that serves stages for a front end: give --headless, too": args.join is not None,
        "--listen, --token-file: give both: hosts join there, and must have the secret": (
            (args.listen is None) != (args.token_file is None)
        ),
        "--ray-address: give --worker-backend ray, too": args.ray_address and not has_ray,
        "--worker-backend ray: not with --dry-run, which asks no cluster: give --inventory FILE": (
            args.dry_run and has_ray
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            parser.error(message)


def _check_host(parser: DeploymentParser, args: argparse.Namespace) -> None:
    for flag, value in (("--join HOST:PORT", args.join), ("--token-file FILE", args.token_file)):
        if value is None:
            parser.error(f"--headless: give {flag}: with --omni, stages run here for a front end on another host")
    if not args.stage:
        parser.error("--headless: give the stages that run here, --stage NAME, as the front end's log names them")
    if settings := [name for name in args.stage if "=" in name]:
        parser.error(f"--stage {settings[0]}: with --headless, a name; settings of stages are the front end's")
    for name in FLAGS_OF_FRONT_END:
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: not with --headless; it is the front end's")


def serve_headless(parsed: Deployment) -> None:
    """Run stages until the front end ends, SIGINT or SIGTERM.

    Raises:
        ConfigError: a flag is the front end's; and as ``serve_stages``.
        FrontEndLost: see ``serve_stages``.
    """
    args = parsed.args
    if given := [name for name in parsed.engine_args if name not in OWN_ARGS]:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag}: not with --headless; settings of engines are the front end's")
    signal.signal(signal.SIGTERM, _end)
    serve_stages(
        args.model,
        args.stage,
        args.join,
        args.token_file,
        pipeline=None if args.pipeline is None else find_pipeline(args.pipeline),
        revision=parsed.engine_args.get("revision"),
    )


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)
