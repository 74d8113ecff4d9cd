"""``vllm-omni doctor``: whether this machine can serve, what is missing, and what dead servers left on it.

Nothing here needs vLLM; what is told of vLLM itself is told if it can be imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import vllm_omni
from vllm_omni import envs
from vllm_omni.compat import SUPPORTED_VLLM, check_vllm_version
from vllm_omni.entrypoints.cli.parser import RefusingParser
from vllm_omni.entrypoints.cli.quiet import hush, only_the_answer_on_stdout
from vllm_omni.errors import ConfigError, MissingDependency
from vllm_omni.names import suggest
from vllm_omni.process.run_directory import SHM, Leftover, find_leftovers, remove_leftover

DISTRIBUTION = "vllm-omni"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME, PLUGIN_VALUE = "vllm_omni", "vllm_omni.plugin:register"
ENGINE_EXTRAS = ("cpu", "cuda")  # one of them must be whole
INSTALL = "in the checkout of this project: pip install -e '.[cpu]' (or '.[cuda]')"

MIN_SHM_BYTES = 256 * 2**20  # Docker's default, 64 MiB, is too little for workers that share tensors
MAX_SOCKET_NAME = 107  # bytes, of a UNIX socket's path
SOCKET_NAME_BYTES = len("/vllm-omni-xxxxxxxx/") + 36  # a private directory, and in it a UUID

# Beside our own: what changes how the stages run. Values are shown, so none of them is a secret.
VARIABLES = (
    "VLLM_PLUGINS VLLM_LOGGING_LEVEL VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_TARGET_DEVICE "
    "VLLM_USE_V2_MODEL_RUNNER VLLM_WORKER_MULTIPROC_METHOD VLLM_ENGINE_READY_TIMEOUT_S VLLM_MEDIA_CACHE "
    "OMP_NUM_THREADS OMP_WAIT_POLICY CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
    "TMPDIR PYTHONPATH"
).split()


@dataclass
class Findings:
    """What was seen, by section, and what is wrong with it."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)  # each with "what" and "remedy": no server would run
    warnings: list[dict[str, str]] = field(default_factory=list)  # likewise: one would, but perhaps not well

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append({"what": what, "remedy": remedy})

    def warn(self, what: str, remedy: str) -> None:
        self.warnings.append({"what": what, "remedy": remedy})


def doctor(args: Sequence[str]) -> None:
    """Print what was found.

    Raises:
        SystemExit: 1 when a server could not run here; every problem is printed with its remedy.
    """
    parser = RefusingParser(
        prog="vllm-omni doctor",
        description="Say whether this machine can serve: versions, devices, memory, packages, environment; each "
        "problem with its remedy. Exit code 0 if a server could run, 1 if not.",
    )
    parser.add_argument("--clean", action="store_true", help="remove what servers that were killed have left")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(args)
    environ = dict(os.environ)
    hush()
    with only_the_answer_on_stdout():
        findings = examine(environ)
        leftovers = examine_leftovers(findings, clean=options.clean)
    if options.json:
        report = {**findings.sections, "leftovers": leftovers}
        print(json.dumps({**report, "problems": findings.problems, "warnings": findings.warnings}, indent=2))
    else:
        _print(findings, leftovers, options.clean)
    if findings.problems:
        raise SystemExit(1)


def examine(environ: Mapping[str, str]) -> Findings:
    """Everything but leftovers, which are not the machine's health."""
    findings = Findings()
    examine_package(findings, sys.path, Path(vllm_omni.__file__).parent)
    examine_plugin(findings, metadata.entry_points(group=PLUGIN_GROUP), environ.get("VLLM_PLUGINS"))
    examine_extras(findings, _requirements())
    examine_vllm(findings)
    examine_machine(findings, _control_groups(), Path("/proc/meminfo"))
    examine_environment(findings, environ)
    return findings


# -- which package of the name is this ---------------------------------------------------------------------------------


def examine_package(findings: Findings, path: Sequence[str], here: Path) -> None:
    """Tell this project from the one on PyPI that is distributed, and imported, under the same names."""
    installed: list[dict[str, Any]] = []
    for found in metadata.distributions(name=DISTRIBUTION, path=list(path)):
        place = str(found.locate_file(""))
        if any(one["place"] == place for one in installed):  # twice on sys.path
            continue
        is_ours = any((e.group, e.value) == (PLUGIN_GROUP, PLUGIN_VALUE) for e in found.entry_points)
        installed.append({"version": found.version, "place": place, "is_ours": is_ours})
        if not is_ours:
            findings.problem(
                f"{place} has the distribution {DISTRIBUTION} {found.version} of another project (on PyPI, by the "
                "vllm-project): its plugin, and its code where it comes first on sys.path, run in place of this one's",
                f"{sys.executable} -m pip uninstall {DISTRIBUTION}; then, {INSTALL}",
            )
    if not installed:
        findings.problem(
            f"no distribution {DISTRIBUTION} is installed, so that vLLM's processes do not find the plugin", INSTALL
        )
    copies: list[Path] = []
    for entry in dict.fromkeys(path):
        package = Path(entry or ".").resolve() / "vllm_omni"
        if not (package / "__init__.py").is_file() or package in (here.resolve(), *copies):
            continue
        copies.append(package)
        is_ours = (package / "plugin.py").is_file() and (package / "flow").is_dir()
        known = any(not one["is_ours"] and Path(one["place"]).resolve() == package.parent for one in installed)
        if not is_ours and not known:
            findings.problem(
                f"{package} is another project's package of the same name, and is on sys.path",
                f"take {package.parent} from sys.path (PYTHONPATH, the current directory), or remove the package",
            )
        elif is_ours:
            findings.warn(
                f"{package} is a second copy of this project on sys.path; {here} is the one that is imported",
                "leave one of them on sys.path",
            )
    findings.sections["package"] = {
        "version": vllm_omni.__version__,
        "imported_from": str(here),
        "distributions": installed,
        "other_copies": [str(copy) for copy in copies],
    }


def examine_plugin(findings: Findings, found: metadata.EntryPoints, chosen: str | None) -> None:
    """Whether vLLM finds our entry point, and may load it."""
    values = sorted({entry.value for entry in found if entry.name == PLUGIN_NAME})
    findings.sections["plugin"] = {"found": values, "VLLM_PLUGINS": chosen}
    if PLUGIN_VALUE not in values:
        findings.problem(f"vLLM finds no plugin {PLUGIN_NAME} in the entry-point group {PLUGIN_GROUP}", INSTALL)
    if len(values) > 1:
        findings.problem(f"several plugins are called {PLUGIN_NAME}: {', '.join(values)}", "uninstall the other one")
    if chosen is not None and PLUGIN_NAME not in chosen.split(","):
        findings.problem(
            f"VLLM_PLUGINS={chosen!r} keeps vLLM from loading the plugin {PLUGIN_NAME}",
            f"add it: VLLM_PLUGINS={','.join(filter(None, [*chosen.split(','), PLUGIN_NAME]))}, or unset the variable",
        )


# -- packages ----------------------------------------------------------------------------------------------------------


def _requirements() -> list[str]:
    """The requirements of our distribution, as its metadata has them; empty if it is not installed."""
    for found in metadata.distributions(name=DISTRIBUTION):
        if any((e.group, e.value) == (PLUGIN_GROUP, PLUGIN_VALUE) for e in found.entry_points):
            return list(found.requires or ())
    return []


def examine_extras(findings: Findings, requirements: Sequence[str]) -> None:
    """What of each extra is missing, and what of the packages that are needed anyway."""
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        wanted = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        assert wanted is not None, f"a requirement begins with a name: {requirement!r}"
        absent = missing.setdefault(extra[1] if extra else "", [])
        if not _is_installed(wanted[1], wanted[2].strip()):
            absent.append(f"{wanted[1]}{wanted[2].strip()}")
    needed = missing.pop("", [])
    findings.sections["extras"] = {"missing": dict(sorted(missing.items()))}
    if needed:
        findings.problem(f"packages are missing, or of another version: {', '.join(needed)}", INSTALL)
    engines = {extra: missing[extra] for extra in ENGINE_EXTRAS if extra in missing}
    if engines and all(engines.values()):
        nearest = min(engines, key=lambda extra: len(engines[extra]))
        findings.problem(
            f"the extra {nearest!r} is not whole: {', '.join(engines[nearest])} is missing, or of another version",
            f"in the checkout of this project: pip install -e '.[{nearest}]'",
        )


def _is_installed(name: str, specifier: str) -> bool:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with vLLM
        return True
    return SpecifierSet(specifier).contains(version, prereleases=True)


def examine_vllm(findings: Findings) -> None:
    """vLLM, torch and transformers, the platform that vLLM detects, and its devices; imports them."""
    providers = sorted(set(metadata.packages_distributions().get("vllm", ())))
    versions: dict[str, Any] = {"python": sys.version.split()[0], "vllm": None, "supported_vllm": SUPPORTED_VLLM}
    versions |= {name: _version(name) for name in ("torch", "transformers")}
    findings.sections["versions"] = versions
    versions["vllm_from"] = [f"{name} {_version(name)}" for name in providers]
    examine_providers(findings, providers, is_called_vllm=_version("vllm") is not None)
    try:
        import vllm
        from vllm.platforms import current_platform
    except Exception as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name == "vllm":
            findings.problem("vLLM is not installed", INSTALL)
        else:
            findings.problem(f"vLLM cannot be imported: {type(exc).__name__}: {_first_line(exc)}", INSTALL)
        return
    versions["vllm"] = vllm.__version__
    try:
        check_vllm_version(vllm.__version__)
    except MissingDependency as exc:
        what, _, remedy = str(exc).partition(": ")
        findings.problem(what, remedy)
    device = current_platform.device_type
    findings.sections["platform"] = {"name": type(current_platform).__name__, "device_type": device}
    if not device:
        findings.problem(
            "vLLM recognises no platform here: its build fits no device of this machine",
            "install the CPU build (the extra `cpu`) where there is no GPU; for a GPU, see that its driver works",
        )
        return
    from vllm_omni.worker.platforms import ar_worker_cls

    try:
        ar_worker_cls(device)
    except ConfigError as exc:
        findings.problem(str(exc), "use a machine of one of these platforms, or install a package that adds this one")
    if device == "cuda":
        _examine_gpus(findings)


def examine_providers(findings: Findings, providers: Sequence[str], *, is_called_vllm: bool) -> None:
    """The distributions whose files are the package ``vllm``: there should be one, and vLLM asks for one so called."""
    if len(providers) > 1:
        findings.problem(
            f"several distributions have the package vllm, {' and '.join(providers)}: files of one replace another's",
            f"{sys.executable} -m pip uninstall {' '.join(providers)}; then, {INSTALL}",
        )
    elif providers and not is_called_vllm:
        findings.warn(
            f"no distribution is called vllm, but {providers[0]}: vLLM's own commands (without --omni) do not start",
            f"in the checkout of this project: {sys.executable} requirements/fix_cpu_env.py",
        )


def _examine_gpus(findings: Findings) -> None:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus.append({"index": index, "name": name, "memory_bytes": total, "free_bytes": free})
    findings.sections["gpus"] = {str(gpu["index"]): gpu for gpu in gpus}
    if not gpus:
        findings.problem("torch sees no GPU", "see that CUDA_VISIBLE_DEVICES names one, and that torch has CUDA")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


# -- the machine -------------------------------------------------------------------------------------------------------


def examine_machine(findings: Findings, cgroups: Sequence[Path], meminfo: Path) -> None:
    """Cores and memory, and what of them the control groups (of this process and above) let it use."""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read(meminfo), re.MULTILINE)}
    total = sizes.get("MemTotal", 0)
    quotas = [quota for group in cgroups if (quota := _cpu_quota(group)) is not None]
    limits = [limit for group in cgroups if (limit := _memory_limit(group)) is not None and limit < total]
    cpu = {"cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "quota": min(quotas, default=None)}
    memory = {
        "total_bytes": total,
        "available_bytes": sizes.get("MemAvailable", 0),
        "cgroup_limit_bytes": min(limits, default=None),
    }
    findings.sections |= {"cpu": cpu, "memory": memory}
    if not SHM.is_dir():
        findings.problem(f"there is no {SHM}, and the stages' processes share memory there", f"mount a tmpfs at {SHM}")
        return
    shm = shutil.disk_usage(SHM)
    memory |= {"shm_bytes": shm.total, "shm_free_bytes": shm.free}
    if shm.free < MIN_SHM_BYTES:
        findings.warn(
            f"{SHM} has {_size(shm.free)} free of {_size(shm.total)}: several workers of one stage may need more",
            "vllm-omni doctor --clean; in a container, start it with --shm-size=1g or --ipc=host",
        )


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    own = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    path = root / (own[1] if own else "")
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def _cpu_quota(group: Path) -> float | None:
    """How many cores' time it may use; None where it is not limited."""
    words = _read(group / "cpu.max").split()
    if not words:  # version 1
        words = [_read(group / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", or -1
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(group: Path) -> int | None:
    """Bytes; version 1 writes a number near 2**63 for "not limited"."""
    text = (_read(group / "memory.max") or _read(group / "memory" / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -- environment -------------------------------------------------------------------------------------------------------


def examine_environment(findings: Findings, environ: Mapping[str, str]) -> None:
    known = {name: environ[name] for name in (*envs.VARIABLES, *VARIABLES) if name in environ}
    findings.sections["environment"] = {name: known[name] for name in sorted(known)}
    for name in sorted(environ):
        if not name.startswith(envs.PREFIX):
            continue
        if name not in envs.VARIABLES:
            findings.problem(
                f"environment variable {name} is not one of this project's, and servers refuse it: "
                f"{suggest(name, envs.VARIABLES)}",
                f"unset {name}",
            )
            continue
        try:
            envs.VARIABLES[name].parse(environ[name])
        except ValueError as exc:
            findings.problem(f"environment variable {name}={environ[name]!r}: must be {exc}", f"unset or mend {name}")
    for parent in _runtime_directories(environ):
        if len(os.fsencode(parent)) + SOCKET_NAME_BYTES > MAX_SOCKET_NAME:
            findings.problem(
                f"{parent}, where servers put their sockets, is too long a path: a socket's has at most "
                f"{MAX_SOCKET_NAME} bytes, and theirs have {SOCKET_NAME_BYTES} more than it",
                "set VLLM_OMNI_RUNTIME_DIR to a directory with a short path",
            )
        elif not os.access(parent, os.W_OK | os.X_OK):
            findings.problem(
                f"{parent} cannot be written to, and servers put their sockets there",
                "set VLLM_OMNI_RUNTIME_DIR to a directory that can be",
            )
        break  # the first is the one in use


def _runtime_directories(environ: Mapping[str, str]) -> list[Path]:
    """Where servers of this user put their private directories: what is set now, and the default."""
    chosen = environ.get("VLLM_OMNI_RUNTIME_DIR")
    paths = [Path(chosen).expanduser()] if chosen else []
    return [path for path in dict.fromkeys([*paths, Path(tempfile.gettempdir())]) if path.is_dir()]


# -- what dead servers left --------------------------------------------------------------------------------------------


def examine_leftovers(findings: Findings, *, clean: bool, now: Callable[[], float] = time.time) -> dict[str, Any]:
    """Find what killed servers left, remove it if asked to, and tell both."""
    found: list[Leftover] = []
    live: list[Path] = []
    for parent in _runtime_directories(os.environ):
        dead_here, live_here = find_leftovers(parent, now())
        found, live = found + dead_here, live + live_here
    told = []
    for leftover in found:
        is_removed = clean and remove_leftover(leftover, now())
        if clean and not is_removed:
            findings.warn(f"{leftover.path} could not be removed whole", f"rm -r {leftover.path}")
        told.append(
            {
                "path": str(leftover.path),
                "blocks": [str(block) for block in leftover.blocks],
                "num_bytes": leftover.num_bytes,
                "removed": is_removed,
            }
        )
    return {"found": told, "live_servers": [str(path) for path in live]}


# -- print -------------------------------------------------------------------------------------------------------------


def _print(findings: Findings, leftovers: Mapping[str, Any], clean: bool) -> None:
    for title, text in _lines(findings.sections):
        print(f"{title:<13}{text}")
    for one in leftovers["found"]:
        fate = "removed" if one["removed"] else "left by a server that is gone"
        what = " ".join([one["path"], *one["blocks"]])
        print(f"{'leftovers':<13}{fate}: {what} ({one['num_bytes']} bytes)")
    if leftovers["found"] and not clean:
        print(f"{'':<13}vllm-omni doctor --clean removes them")
    for path in leftovers["live_servers"]:
        print(f"{'live':<13}{path} belongs to a server that runs")
    for level, found in (("warning", findings.warnings), ("problem", findings.problems)):
        for one in found:
            print(f"\n{level}: {one['what']}\n  remedy: {one['remedy']}")
    print("\nA server could not run here." if findings.problems else "\nA server can run here.")


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    package, versions, cpu, memory = (sections[name] for name in ("package", "versions", "cpu", "memory"))
    yield "package", f"vllm_omni {package['version']} from {package['imported_from']}"
    yield "plugin", ", ".join(sections["plugin"]["found"]) or "not found"
    yield "python", versions["python"]
    yield (
        "vllm",
        f"{versions['vllm'] or 'none'} ({', '.join(versions['vllm_from']) or 'no distribution'}), "
        + (f"supported {versions['supported_vllm']}"),
    )
    for name in ("torch", "transformers"):
        yield name, versions[name] or "none"
    platform = sections.get("platform")
    if platform:
        yield "platform", f"{platform['device_type'] or 'none'} ({platform['name']})"
    for gpu in sections.get("gpus", {}).values():
        yield "gpu", f"{gpu['name']}, {_size(gpu['free_bytes'])} free of {_size(gpu['memory_bytes'])}"
    quota = "" if cpu["quota"] is None else f", a quota of {cpu['quota']:g}"
    yield "cpu", f"{cpu['usable']} of {cpu['cores']} cores usable{quota}"
    limit = memory["cgroup_limit_bytes"]
    limited = "" if limit is None else f", limited to {_size(limit)} by the control group"
    yield "memory", f"{_size(memory['available_bytes'])} available of {_size(memory['total_bytes'])}{limited}"
    if "shm_bytes" in memory:
        yield str(SHM), f"{_size(memory['shm_free_bytes'])} free of {_size(memory['shm_bytes'])}"
    for extra, missing in sections["extras"]["missing"].items():
        yield "extra", f"{extra}: " + (f"without {', '.join(missing)}" if missing else "whole")
    for name, value in sections["environment"].items():
        yield "environment", f"{name}={value}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
