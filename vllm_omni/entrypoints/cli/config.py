"""``vllm-omni config show MODEL``; its help imports no vLLM."""

from collections.abc import Sequence

from vllm_omni.compat import require_vllm
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

DESCRIPTION = """Show how these arguments deploy a model, as a file for --deploy-config with the origin of each value in
a comment. No stage is started."""

USAGE = "vllm-omni config show MODEL [options]"


def config(args: Sequence[str]) -> None:
    """Call the sub-command ``show``, see ``config_show``; raises ``ConfigError`` for another one."""
    what, rest = (args[0], args[1:]) if args else ("--help", args)
    if what in ("-h", "--help"):
        print(f"usage: {USAGE}\n\n{DESCRIPTION}\n\nvllm-omni config show --help for its options")
        return
    if what != "show":
        raise ConfigError(f"config {what}: {suggest(what, ['show'])}")
    require_vllm("vllm-omni config show")
    from vllm_omni.entrypoints.cli.config_show import show

    show(rest)
