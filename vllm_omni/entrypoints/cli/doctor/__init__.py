"""``vllm-omni doctor``: whether this machine can serve, what is missing, and what killed servers left on it.

Nothing here imports vLLM, which takes seconds, but ``--deep``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import vllm_omni
from vllm_omni.cgroups import control_groups
from vllm_omni.entrypoints.cli.doctor import package
from vllm_omni.entrypoints.cli.doctor.machine import examine_environment, examine_machine, runtime_directories
from vllm_omni.entrypoints.cli.doctor.report import Report, format_size
from vllm_omni.entrypoints.cli.doctor.shared_memory import examine_shared_memory, shared_memory_lines
from vllm_omni.entrypoints.cli.parser import RejectingParser
from vllm_omni.entrypoints.cli.quiet import hush, only_the_answer_on_stdout
from vllm_omni.process.leftovers import find_leftovers, remove_leftover
from vllm_omni.process.proc import SHM


def doctor(args: Sequence[str]) -> None:
    """Print a report.

    Raises:
        SystemExit: 1 when a server could not run here; every problem is printed with its remedy.
    """
    parser = RejectingParser(
        prog="vllm-omni doctor",
        description="Check whether this machine can serve: versions, devices, memory, packages, environment; each "
        "problem with its remedy. Exit code 0 if a server could run, 1 if not.",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove what killed servers have left, also KV pages that a new one would adopt",
    )
    parser.add_argument(
        "--deep", action="store_true", help="also import vLLM, which takes seconds: whether it loads, platform, GPUs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    environ = dict(os.environ)
    hush()
    with only_the_answer_on_stdout():
        report = examine(environ, clean=options.clean, deep=options.deep)
    if options.json:
        problems, warnings = ([one._asdict() for one in found] for found in (report.problems, report.warnings))
        print(json.dumps({**report.sections, "problems": problems, "warnings": warnings}, indent=2))
    else:
        _print(report, is_clean=options.clean, is_deep=options.deep)
    if report.problems:
        raise SystemExit(1)


def examine(environ: Mapping[str, str], *, clean: bool = False, deep: bool = False) -> Report:
    """Examine everything; ``clean`` removes leftovers, ``deep`` imports vLLM."""
    report = Report()
    package.examine_package(report, sys.path, Path(vllm_omni.__file__).parent)
    entry_points = metadata.entry_points(group=package.PLUGIN_GROUP)
    package.examine_plugin(report, entry_points, environ.get("VLLM_PLUGINS"))
    package.examine_extras(report, package.requirements())
    package.examine_vllm(report)
    if deep and report.sections["versions"]["vllm"] is not None:
        package.examine_platform(report)
    examine_machine(report, control_groups(), Path("/proc/meminfo"))
    examine_environment(report, environ)
    examine_leftovers(report, runtime_directories(environ), clean=clean)
    examine_shared_memory(report, time.time(), clean=clean)
    return report


def examine_leftovers(report: Report, parents: Sequence[Path], *, clean: bool) -> None:
    """Find the directories and the shared memory that killed servers have left; remove them if asked to."""
    found, live = [], []
    for parent in parents:
        left_here, live_here = find_leftovers(parent, time.time())
        live += [str(path) for path in live_here]
        for leftover in left_here:
            is_removed = clean and remove_leftover(leftover, time.time())
            if clean and not is_removed:
                report.warn(f"{leftover.path} could not be removed entirely", f"rm -r {leftover.path}")
            blocks = [str(block) for block in leftover.blocks]
            one = {"path": str(leftover.path), "blocks": blocks, "num_bytes": leftover.num_bytes, "removed": is_removed}
            found.append(one)
    report.sections["leftovers"] = {"found": found, "live_servers": live}


def _print(report: Report, *, is_clean: bool, is_deep: bool) -> None:
    for title, text in (*_lines(report.sections), *_leftover_lines(report.sections, is_clean=is_clean)):
        print(f"{title:<13}{text}")
    for level, findings in (("warning", report.warnings), ("problem", report.problems)):
        for finding in findings:
            print(f"\n{level}: {finding.what}\n  remedy: {finding.remedy}")
    if report.problems:
        print("\nA server could not run here.")
    else:
        print(f"\nA server can run here{'' if is_deep else ', if vLLM loads (vllm-omni doctor --deep)'}.")


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    yield from _package_lines(sections)
    yield from _machine_lines(sections)
    for extra, missing in sections["extras"]["missing"].items():
        yield "extra", f"{extra}: " + (f"without {', '.join(missing)}" if missing else "complete")
    for name, value in sections["environment"].items():
        yield "environment", f"{name}={value}"


def _leftover_lines(sections: Mapping[str, Mapping[str, Any]], *, is_clean: bool) -> Iterator[tuple[str, str]]:
    leftovers, in_shared_memory = sections["leftovers"], list(shared_memory_lines(sections["shared_memory"]))
    for one in leftovers["found"]:
        fate = "removed" if one["removed"] else "left by a server that was killed"
        yield "leftovers", f"{fate}: {' '.join([one['path'], *one['blocks']])} ({one['num_bytes']} bytes)"
    yield from in_shared_memory
    if (leftovers["found"] or in_shared_memory) and not is_clean:
        yield "", "vllm-omni doctor --clean removes them"
    for path in leftovers["live_servers"]:
        yield "live", f"{path} belongs to a server that runs"


def _package_lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    found, versions = sections["package"], sections["versions"]
    yield "package", f"vllm_omni {found['version']} from {found['imported_from']}"
    yield "plugin", ", ".join(sections["plugin"]["found"]) or "not found"
    yield "python", versions["python"]
    providers = ", ".join(versions["vllm_from"]) or "no distribution"
    yield "vllm", f"{versions['vllm'] or 'none'} ({providers}), supported {versions['supported_vllm']}"
    for name in ("torch", "transformers"):
        yield name, versions[name] or "none"


def _machine_lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    if platform := sections.get("platform"):
        yield "platform", f"{platform['device_type'] or 'none'} ({platform['name']})"
    for gpu in sections.get("gpus", {}).values():
        yield "gpu", f"{gpu['name']}, {format_size(gpu['free_bytes'])} free of {format_size(gpu['memory_bytes'])}"
    cpu, memory = sections["cpu"], {name: size and format_size(size) for name, size in sections["memory"].items()}
    quota = "" if cpu["quota"] is None else f", a quota of {cpu['quota']:g}"
    yield "cpu", f"{cpu['usable']} of {cpu['cores']} cores usable{quota}"
    limit = memory["cgroup_limit_bytes"]
    limited = f", limited to {limit} by the control group" if limit else ""
    yield "memory", f"{memory['available_bytes']} available of {memory['total_bytes']}{limited}"
    if "shm_bytes" in memory:
        yield str(SHM), f"{memory['shm_free_bytes']} free of {memory['shm_bytes']}"
