"""The flags of a deployment, common to all commands that start stages or show them."""

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.utils.argparse_utils import FlexibleArgumentParser, SortedHelpFormatter, summary_line
from yaml import YAMLError

from vllm_omni.config import OmniConfig, load_config
from vllm_omni.entrypoints.cli.parser import RejectingParser

EPILOG = """All flags: {prog} --help=all; those of a section: --help=ModelConfig; one: --help=max-model-len."""


class _HelpFormatter(SortedHelpFormatter):
    """Leaves out defaults that carry no information."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


class DeploymentParser(RejectingParser, FlexibleArgumentParser):
    """vLLM's parser (dashes or underscores, --config FILE, dotted JSON) with our errors and help."""

    own_groups: Sequence[str] = ()  # titles of the groups that --help prints in full

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def drop_defaults(self) -> None:
        """Leave arguments that are not given out of the namespace."""
        for action in self._actions:
            action.default = argparse.SUPPRESS

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        logger = logging.getLogger(FlexibleArgumentParser.__module__)
        logger.addFilter(_is_relevant)
        try:
            return super().parse_args(*args, **kwargs)
        finally:
            logger.removeFilter(_is_relevant)

    def load_config_file(self, file_path: str) -> list[str]:
        """Read flags from a file, as upstream, which assumes that the file is a mapping in YAML."""
        try:
            flags: list[str] = super().load_config_file(file_path)
        except (YAMLError, AttributeError) as exc:
            why = " ".join(str(exc).split()) if isinstance(exc, YAMLError) else "must be a mapping of flags to values"
            raise ValueError(f"--config {file_path}: {why}") from exc
        return flags

    def format_help(self) -> str:
        """List the names of the groups, as upstream, and print our own groups in full."""
        if self._subparsers is not None or self._search_keyword is not None or not self.own_groups:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        groups = {group.title or "": group for group in self._action_groups if group._group_actions}
        for title in self.own_groups:
            formatter.start_section(title)
            formatter.add_text(groups[title].description)
            argparse.HelpFormatter.add_arguments(formatter, groups[title]._group_actions)  # in their order
            formatter.end_section()
        sections = [
            f"  {title:<26}{summary_line(group.description).partition('. ')[0]}"
            for title, group in groups.items()
            if title not in (*self.own_groups, "positional arguments", "options")
        ]
        formatter.add_text("vLLM's flags, by section:\n" + "\n".join(sections))
        formatter.add_text(self.epilog)
        return formatter.format_help()


def _is_relevant(record: logging.LogRecord) -> bool:
    """Drop warnings of a flag that is given twice, as some may be, and of a wrong --config, which is an error."""
    return not record.getMessage().startswith(("Found duplicate keys", "Unable to read the config file"))


class Deployment(NamedTuple):
    """A parsed command line."""

    args: argparse.Namespace  # all arguments, with defaults
    engine_args: dict[str, Any]  # the given fields of EngineArgs, without defaults

    def load_config(self, **engine_args: Any) -> OmniConfig:
        """Load the deployment; the command line wins over these ``engine_args``. Raises ``ConfigError``."""
        return load_config(
            self.args.model,
            pipeline=self.args.pipeline,
            deploy_config=self.args.deploy_config,
            overrides=self.args.stage_overrides,
            stage_overrides=self.args.stage,
            epd=self.args.epd,
            kv_pool=self.args.kv_pool,
            listen=getattr(self.args, "listen", None),
            token_file=getattr(self.args, "token_file", None),
            worker_backend=getattr(self.args, "worker_backend", None),
            ray_address=getattr(self.args, "ray_address", None),
            **(engine_args | self.engine_args),
        )


def parse_deployment(
    command: str,
    args: Sequence[str],
    add_arguments: Callable[[DeploymentParser], None],
    check: Callable[[DeploymentParser, argparse.Namespace], None] | None = None,
    **parser_options: Any,
) -> Deployment:
    """Parse the arguments of a command; exit with code 2 if they are wrong.

    Args:
        add_arguments: adds the command's arguments, one of which must be ``model_tag``, and vLLM's.
        check: rejects combinations of arguments, by ``parser.error`` or ``ValueError``.
        parser_options: keywords of the command's ``ArgumentParser``.
    """
    root, parser = _make_parsers(command, add_arguments, parser_options)
    command_line = [command, *args]
    try:
        parsed = root.parse_args(command_line)
        if parsed.model_tag is None:
            parser.error(f"no model: give the directory or hub name of a checkpoint, {parser.prog} MODEL")
        parsed.model = parsed.model_tag
        if check is not None:
            check(parser, parsed)
        parser.drop_defaults()
        given = vars(root.parse_args(command_line))
    except OSError as exc:
        parser.error(f"{exc.filename}: {exc.strerror}" if exc.strerror else str(exc))
    except (ValueError, TypeError, VLLMClientError) as exc:  # vLLM's checks
        parser.error(str(exc))
    if "model" in given:
        parser.error(f"--model: give it without the flag, {parser.prog} MODEL")
    names = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    return Deployment(parsed, {name: value for name, value in given.items() if name in names})


def _make_parsers(
    command: str, add_arguments: Callable[[DeploymentParser], None], options: Mapping[str, Any]
) -> tuple[DeploymentParser, DeploymentParser]:
    """Return the parser to call, and the command's, which is its subparser."""
    # vLLM's parser must be a subcommand: it inspects the first word.
    root = DeploymentParser(prog="vllm-omni")
    parser = root.add_subparsers(dest="subparser").add_parser(
        command,
        allow_abbrev=False,  # a misspelled flag is rejected rather than taken for another
        formatter_class=_HelpFormatter,
        epilog=EPILOG.format(prog=f"vllm-omni {command}"),
        **options,
    )
    assert isinstance(parser, DeploymentParser), "argparse makes subparsers of the root's class"
    _add_deployment_group(parser)
    add_arguments(parser)
    root.prog = parser.prog
    root.options = parser.flags
    return root, parser


def _add_deployment_group(parser: DeploymentParser) -> None:
    group = parser.add_argument_group("Omni", "Deployment of the stages of an any-to-any model.")
    group.add_argument(
        "--pipeline",
        metavar="FILE.py:CLASS",
        help="A pipeline of your own, instead of the one for the model's type; or MODULE:CLASS.",
    )
    group.add_argument(
        "--deploy-config",
        metavar="FILE",
        help="A YAML file that overrides the one bundled for the model's type: stages, edges, engine_args, voices.",
    )
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        type=json_object,
        help='The same keys as JSON; stages by name or id: \'{"talker": {"max_num_seqs": 8}}\'.',
    )
    group.add_argument(
        "--stage",
        metavar="NAME.KEY=VALUE",
        action="append",
        default=[],
        help="Set one key of one stage, for example thinker.max_num_seqs=8. May be repeated; wins over the rest.",
    )
    group.add_argument(
        "--epd",
        metavar="KIND:NUMBER,...",
        help="Instances of the first stage, for example E:1,PD:1: E encodes images, P prefills, D decodes; EP, ED, PD "
        "and EPD do several.",
    )
    group.add_argument(
        "--kv-pool",
        metavar="BYTES",
        type=int,
        help="Keep so many bytes of the first stage's KV pages in shared memory, where the next engine finds them; for "
        "pages on disk see --stage NAME.kv_pool.disk=DIRECTORY.",
    )


def add_engine_flags(parser: DeploymentParser) -> None:
    """Add MODEL and the flags of vLLM's engines; a command's own flag of the same name, added later, wins."""
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="Directory or hub name of a checkpoint.")
    parser.add_argument("--config", metavar="FILE", help="Read flags from a YAML file.")
    EngineArgs.add_cli_args(parser)


def json_object(text: str) -> dict[str, Any]:
    """For ``type`` of an argument."""
    try:
        value: object = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
