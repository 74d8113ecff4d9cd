"""``vllm-omni plan-memory MODEL``: how the stages would share the memory of their devices; loads no weights."""

import argparse
import re
from collections.abc import Mapping, Sequence

from vllm.logger import configure_logging_from_args

from vllm_omni.engine.memory import devices_of, find_device, plan_devices
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser, add_engine_flags, parse_deployment
from vllm_omni.entrypoints.cli.quiet import only_the_answer_on_stdout
from vllm_omni.process.memory import Device, DevicePlan, format_bytes

DESCRIPTION = """Print how the stages would share the memory of their devices: weights by the checkpoint's files,
activations by an estimate, caches by what max_model_len and max_num_seqs declare. What cannot fit is an error with the
nearest change that would. No stage is started, and no weights are loaded."""

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
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
        type=parse_bytes,
        help="Plan for devices of this size, for example 24GiB, instead of those found; with the engine arguments of "
        "this machine's platform.",
    )


def parse_bytes(text: str) -> int:
    """For ``type`` of an argument: "24GiB", "80GB" or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|)", text, re.IGNORECASE)
    if found is None or not (size := int(float(found[1]) * UNITS[found[2].upper()])):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give for example 24GiB, 80GB or 512MiB")
    return size


def print_plan(parsed: Deployment) -> None:
    """Plan the deployment of a command line that has ``--device-memory``, and print it to stdout.

    Raises:
        ConfigError: the deployment is wrong, or does not fit.
    """
    with only_the_answer_on_stdout() as stdout:
        orchestrator = Orchestrator(parsed.load_config())
        engines = [engine for stage in orchestrator.config.stages for engine in orchestrator.make_node(stage)[0]]
        names = sorted({name for engine in engines for name in devices_of(engine.vllm_config)})
        size = parsed.args.device_memory
        devices = {
            name: find_device(name) if size is None else Device(name=name, total=size, free=size) for name in names
        }
        print("\n".join(table(devices, plan_devices(engines, devices))), file=stdout)


def table(devices: Mapping[str, Device], plans: Mapping[str, DevicePlan]) -> list[str]:
    """The lines of the answer: a row for each rank, and a line for each device."""
    rows: list[Sequence[str]] = [HEADER]
    for name, plan in plans.items():
        for stage in plan.stages:
            sizes = (
                stage.weights,
                stage.activations,
                stage.cache_min,
                plan.caches.get(stage.stage, 0),
                stage.cache_max,
            )
            rows.append((stage.stage, name, *(format_bytes(size) if size else "-" for size in sizes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, plan in plans.items():
        device, kept = devices[name], devices[name].free - plan.planned
        lines.append(
            f"{name}: {format_bytes(device.free)} free of {format_bytes(device.total)}, "
            f"{format_bytes(plan.planned)} planned, {format_bytes(kept)} rest"
        )
    return lines
