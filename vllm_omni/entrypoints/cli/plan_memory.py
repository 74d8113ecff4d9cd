"""``vllm-omni plan-memory MODEL``: how the stages would share the memory of their devices; loads no weights."""

import argparse
from collections.abc import Mapping, Sequence

from vllm.logger import configure_logging_from_args

from vllm_omni.deploy.inventory import this_host
from vllm_omni.deploy.needs import stages_of
from vllm_omni.deploy.placement import PlacementPlan, plan
from vllm_omni.deploy.resources import Host, Place
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser, add_engine_flags, parse_deployment
from vllm_omni.entrypoints.cli.quiet import only_the_answer_on_stdout
from vllm_omni.entrypoints.cli.table import table_lines
from vllm_omni.process.memory import DevicePlan, format_bytes, parse_bytes

DESCRIPTION = """Print how the stages would share the memory of their devices: weights by the checkpoint's files,
activations by an estimate, caches by what max_model_len and max_num_seqs declare. What cannot fit is an error with the
nearest change that would. No stage is started, and no weights are loaded."""

HEADER = ("stage", "device", "weights", "activations", "cache min", "planned", "max")


def plan_memory(args: Sequence[str]) -> None:
    """Print the plan.

    Raises:
        SystemExit: a flag is wrong.
        ConfigError: the deployment is wrong, or does not fit.
    """
    parsed = parse_deployment(
        "plan-memory",
        args,
        _add_arguments,
        description=DESCRIPTION,
        usage="vllm-omni plan-memory MODEL [options]",
    )
    configure_logging_from_args(parsed.args)
    print_plan(parsed)


def _add_arguments(parser: DeploymentParser) -> None:
    add_engine_flags(parser)
    add_device_flag(parser.add_argument_group("Devices", "Other devices than those of this machine."))
    parser.own_groups = ["Omni", "Devices"]


def add_device_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=size,
        help="Plan for devices of this size, for example 24GiB, instead of those found; with the engine arguments of "
        "this machine's platform.",
    )


def size(text: str) -> int:
    """For ``type`` of an argument: "24GiB", "80GB" or a number of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def print_plan(parsed: Deployment) -> None:
    """Plan the deployment of a command line that has ``--device-memory``, and print it to stdout.

    Raises:
        ConfigError: the deployment is wrong, or does not fit.
    """
    with only_the_answer_on_stdout() as stdout:
        made = place(parsed, [this_host(parsed.args.device_memory)])
        rows: list[Sequence[str]] = [HEADER]
        for place_, divided in made.memory().items():
            rows += ((stage, place_.device, *cells) for stage, cells in memory_cells(divided).items())
        print("\n".join([*table_lines(rows), *device_lines(made)]), file=stdout)


def place(parsed: Deployment, hosts: Sequence[Host]) -> PlacementPlan:
    """Place the deployment of a command line on hosts, by what can be known of its memory before a start.

    Raises:
        ConfigError: the deployment is wrong, or does not fit.
    """
    config = parsed.load_config()
    return plan(stages_of(config, Orchestrator(config)), hosts)


def memory_cells(divided: DevicePlan) -> Mapping[str, Sequence[str]]:
    """Rank -> its weights, activations, least, planned and largest cache."""
    return {
        one.stage: [
            format_bytes(size) if size else "-"
            for size in (one.weights, one.activations, one.cache_min, divided.caches.get(one.stage, 0), one.cache_max)
        ]
        for one in divided.stages
    }


def device_lines(made: PlacementPlan) -> list[str]:
    """A line for each device in use."""
    devices = {Place(host.name, one.name): one for host in made.hosts for one in host.devices}
    lines = []
    for place_, divided in made.memory().items():
        device = devices[place_]
        name = place_.device if len(made.hosts) == 1 else f"{place_.host} {place_.device}"
        lines.append(
            f"{name}: {format_bytes(device.free)} free of {format_bytes(device.total)}, "
            f"{format_bytes(divided.planned)} planned, {format_bytes(device.free - divided.planned)} rest"
        )
    return lines
