"""``vllm-omni serve MODEL``: vLLM's flags, and ours."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.exceptions import VLLMClientError
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.entrypoints.cli.parser import RefusingParser

DESCRIPTION = """Serve an any-to-any model over HTTP, with OpenAI's API. Every flag of `vllm serve` is a flag of this
command; engine flags go to the stages that they concern, --stage and its like set one stage alone."""


class ServeParser(RefusingParser, FlexibleArgumentParser):
    """vLLM's parser (dashes or underscores, --config FILE, dotted JSON) with our manner of refusing."""


class ServeArgs(NamedTuple):
    """What a command line said."""

    args: argparse.Namespace  # all of it, defaults filled in, as vLLM's server reads it
    engine_args: dict[str, Any]  # the fields of EngineArgs that were given, and no default

    def load_config(self) -> OmniConfig:
        """The deployment. Raises ``ConfigError``."""
        return load_config(
            self.args.model,
            deploy_config=self.args.deploy_config,
            overrides=self.args.stage_overrides,
            stage_overrides=self.args.stage,
            **self.engine_args,
        )


def serve(args: Sequence[str]) -> None:
    """Parse, start every stage, serve until SIGINT or SIGTERM.

    Raises:
        SystemExit: a flag is wrong.
        ConfigError, StageFailed: the deployment is wrong, or a stage did not start.
    """
    parsed = parse_serve_args(args)
    configure_logging_from_args(parsed.args)
    config = parsed.load_config()
    from vllm_omni.entrypoints.openai.app import run_server

    run_server(parsed.args, config)


def parse_serve_args(args: Sequence[str]) -> ServeArgs:
    """Parse the arguments behind ``serve``; exits with code 2 if they are wrong."""
    root, parser = _make_parsers()
    command_line = ["serve", *args]
    try:
        parsed = root.parse_args(command_line)
        parsed.model = parsed.model_tag
        _check(parser, parsed)
        validate_parsed_serve_args(parsed)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
        given = vars(root.parse_args(command_line))
    except (ValueError, TypeError, OSError, VLLMClientError) as exc:  # vLLM's checks, and its reading of --config
        parser.error(str(exc))
    names = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    return ServeArgs(parsed, {name: value for name, value in given.items() if name in names})


def _make_parsers() -> tuple[ServeParser, ServeParser]:
    """The root, which knows the subcommand as vLLM's does, and the subcommand's own."""
    root = ServeParser(prog="vllm-omni")
    parser = root.add_subparsers(dest="subparser").add_parser(
        "serve",
        allow_abbrev=False,  # a flag that is nearly right is refused, rather than taken for another
        description=DESCRIPTION,
        usage="vllm-omni serve MODEL [options]  (or: vllm serve MODEL --omni [options])",
    )
    assert isinstance(parser, ServeParser), "argparse makes subparsers of the root's class"
    group = parser.add_argument_group("Omni", "How the stages of an any-to-any model are deployed.")
    group.add_argument(
        "--deploy-config",
        metavar="FILE",
        help="A YAML file over the one that is bundled for the model's type: stages, edges, engine_args.",
    )
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        type=_json_mapping,
        help='The same keys as JSON; stages by name or id: \'{"talker": {"max_num_seqs": 8}}\'.',
    )
    group.add_argument(
        "--stage",
        metavar="NAME.KEY=VALUE",
        action="append",
        default=[],
        help="Set one key of one stage, for example thinker.max_num_seqs=8. May be repeated; wins over the rest.",
    )
    make_arg_parser(parser)
    parser.epilog = VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="serve").replace("vllm serve", "vllm-omni serve")
    root.prog = parser.prog
    root.options = list(parser._option_string_actions)
    return root, parser


def _check(parser: ServeParser, args: argparse.Namespace) -> None:
    """Refuse what vLLM's server has and this one has not."""

    def refuse(message: str) -> NoReturn:
        parser.error(message)

    if args.model is None:
        refuse("no model: give the directory or hub name of a checkpoint, vllm-omni serve MODEL")
    if args.headless:
        refuse("--headless: not with --omni; the stages run beside the server")
    if args.grpc or args.grpc_port is not None:
        refuse("--grpc, --grpc-port: not with --omni; it serves HTTP")
    if args.api_server_count not in (None, 1):
        refuse(f"--api-server-count {args.api_server_count}: not with --omni; one process serves and routes, give 1")


def _json_mapping(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object of stages")
    return value
