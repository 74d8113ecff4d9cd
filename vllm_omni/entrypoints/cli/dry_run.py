"""``serve --dry-run``: which host and devices each engine would get; starts nothing, and loads no weights."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_omni.deploy.inventory import read_inventory, this_host
from vllm_omni.deploy.needs import list_engines, list_every_engine
from vllm_omni.deploy.placement import PlacementPlan
from vllm_omni.deploy.resources import Host, Replica
from vllm_omni.entrypoints.cli.deployment import Deployment
from vllm_omni.entrypoints.cli.plan_memory import add_device_flag, device_lines, place
from vllm_omni.entrypoints.cli.quiet import only_the_answer_on_stdout
from vllm_omni.entrypoints.cli.table import table_lines
from vllm_omni.process.memory import DevicePlan, format_bytes, name_rank

HEADER = ("engine", "layer", "host", "address", "devices", "weights", "activations", "cache")


def add_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Print which devices each engine would get, and how much of their memory, and start nothing.",
    )
    group.add_argument(
        "--inventory",
        metavar="FILE",
        type=Path,
        help="With --dry-run: plan for the hosts of this YAML file, instead of this one.",
    )
    add_device_flag(group)


def print_placement(parsed: Deployment) -> None:
    """Print the plan of a command line that has ``--inventory`` and ``--device-memory`` to stdout.

    Raises:
        ConfigError: the deployment or the inventory is wrong, or something finds no place.
    """
    with only_the_answer_on_stdout() as stdout:
        file = parsed.args.inventory
        hosts = [this_host(parsed.args.device_memory)] if file is None else read_inventory(file)
        made = place(parsed, hosts)
        config = parsed.load_config()
        left = [one.name for one in list_engines(config) if one.is_left_to_vllm]
        said = [f"not planned, their devices are left to vLLM: {', '.join(left)}"] if left else []
        away = [
            f"{one.name} ({' and '.join(map(str, dict.fromkeys(one.config.part_hosts)))})"
            for one in list_every_engine(config)
            if one.config.host is not None
        ]
        said += [f"not planned, each host divides its own devices: {', '.join(away)}"] if away else []
        print("\n".join([*lines(made), *said]), file=stdout)


def lines(made: PlacementPlan) -> Iterator[str]:
    """A table with a row for each engine on each of its hosts, and the devices in use."""
    yield from table_lines([HEADER, *_rows(made)])
    yield from device_lines(made)
    if unused := [host.name for host in made.hosts if not any(host.name in one.hosts for one in made.replicas)]:
        yield f"not used: {', '.join(unused)}"


def _rows(made: PlacementPlan) -> Iterator[Sequence[str]]:
    hosts = {host.name: host for host in made.hosts}
    divided = made.memory()
    for one in made.replicas:
        for name in one.hosts:
            sizes = _sizes(one, name, [divided[place] for place in dict.fromkeys(one.places) if place.host == name])
            cells = [format_bytes(size) if size else "-" for size in sizes]
            host = hosts[name]
            yield one.name, str(one.layer), name, host.address or "-", _devices(one, host), *cells


def _devices(replica: Replica, host: Host) -> str:
    """Devices with what they have in common once: "cuda:0,1"."""
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for device in replica.devices_on(host.name):
        kind, _, number = device.rpartition(":")
        by_kind[kind].append(number)
    return " ".join(f"{kind}:{','.join(own)}" if kind else own[0] for kind, own in by_kind.items())


def _sizes(replica: Replica, host: str, devices: Sequence[DevicePlan]) -> tuple[int, int, int]:
    """Weights, activations and caches of the ranks on one host, together."""
    count = len(replica.places)
    own = {name_rank(replica.name, rank, count) for rank in range(count) if replica.places[rank].host == host}
    ranks = [stage for device in devices for stage in device.stages if stage.stage in own]
    caches = sum(size for device in devices for name, size in device.caches.items() if name in own)
    return sum(one.weights for one in ranks), sum(one.activations for one in ranks), caches
