"""What is installed: this package, its plugin, its extras, vLLM and the platform that vLLM detects."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import vllm_omni
from vllm_omni.compat import (
    DISTRIBUTION,
    NAMESAKE,
    PLUGIN_GROUP,
    PLUGIN_VALUE,
    SUPPORTED_VLLM,
    check_vllm_version,
    is_ours,
)
from vllm_omni.entrypoints.cli.doctor.report import Report
from vllm_omni.errors import ConfigError, MissingDependency, how_to_install

PLUGIN_NAME = "vllm_omni"
ENGINE_EXTRAS = ("cpu", "cuda")  # one of them must be complete
INSTALL = how_to_install(*ENGINE_EXTRAS)


def examine_package(report: Report, path: Sequence[str], here: Path) -> None:
    """Distinguish this project from the one on PyPI whose package has the same name.

    Args:
        path: ``sys.path``.
        here: directory of the package that is imported.
    """
    installed = _examine_distributions(report, path)
    others = [Path(one["place"]).resolve() for one in installed if one["name"] == NAMESAKE]
    copies = _examine_copies(report, path, here, others)
    report.sections["package"] = {
        "version": vllm_omni.__version__,
        "imported_from": str(here),
        "distributions": installed,
        "other_copies": [str(copy) for copy in copies],
    }


def _examine_distributions(report: Report, path: Sequence[str]) -> list[dict[str, Any]]:
    installed: dict[tuple[str, str], dict[str, Any]] = {}  # by name and place: a directory may be on sys.path twice
    for name in (DISTRIBUTION, NAMESAKE):
        for found in metadata.distributions(name=name, path=list(path)):
            place = str(found.locate_file(""))
            installed[name, place] = {"name": name, "version": found.version, "place": place}
            if name == NAMESAKE:
                _report_namesake(report, found, place)
    if not installed:
        report.problem(
            f"no distribution {DISTRIBUTION} is installed, so vLLM's processes do not find the plugin", INSTALL
        )
    return list(installed.values())


def _report_namesake(report: Report, found: metadata.Distribution, place: str) -> None:
    what = f"{place} has the distribution {NAMESAKE} {found.version}"
    remedy = f"{sys.executable} -m pip uninstall {NAMESAKE}; then, {INSTALL}"
    if is_ours(found):
        report.warn(f"{what}, which installs this project under another project's name", remedy)
    else:
        report.problem(
            f"{what} of another project (on PyPI, by the vllm-project): its plugin, and its code where it comes "
            "first on sys.path, run in place of this one's",
            remedy,
        )


def _examine_copies(report: Report, path: Sequence[str], here: Path, reported: Sequence[Path]) -> list[Path]:
    """Find further packages of this name; those of ``reported`` distributions have a finding already."""
    copies: list[Path] = []
    for entry in dict.fromkeys(path):
        package = Path(entry or ".").resolve() / "vllm_omni"
        if not (package / "__init__.py").is_file() or package in (here.resolve(), *copies):
            continue
        copies.append(package)
        if (package / "plugin.py").is_file() and (package / "flow").is_dir():
            report.warn(
                f"{package} is a second copy of this project on sys.path; {here} is the one that is imported",
                "leave one of them on sys.path",
            )
        elif package.parent not in reported:
            report.problem(
                f"{package} is another project's package of the same name, and is on sys.path",
                f"take {package.parent} from sys.path (PYTHONPATH, the current directory), or remove the package",
            )
    return copies


def examine_plugin(report: Report, found: metadata.EntryPoints, chosen: str | None) -> None:
    """Check that vLLM finds this project's entry point, and may load it.

    Args:
        found: the entry points of ``PLUGIN_GROUP``.
        chosen: value of ``VLLM_PLUGINS``.
    """
    values = sorted({entry.value for entry in found if entry.name == PLUGIN_NAME})
    report.sections["plugin"] = {"found": values, "VLLM_PLUGINS": chosen}
    if PLUGIN_VALUE not in values:
        report.problem(f"vLLM finds no plugin {PLUGIN_NAME} in the entry-point group {PLUGIN_GROUP}", INSTALL)
    if len(values) > 1:
        report.problem(f"several plugins are called {PLUGIN_NAME}: {', '.join(values)}", "uninstall the other one")
    if chosen is not None and PLUGIN_NAME not in chosen.split(","):
        report.problem(
            f"VLLM_PLUGINS={chosen!r} keeps vLLM from loading the plugin {PLUGIN_NAME}",
            f"add it: VLLM_PLUGINS={','.join(filter(None, [*chosen.split(','), PLUGIN_NAME]))}, or unset the variable",
        )


def requirements() -> list[str]:
    """The requirements in the metadata of this project's distribution; empty if it is not installed."""
    return list(next((found.requires or () for found in metadata.distributions(name=DISTRIBUTION)), ()))


def examine_extras(report: Report, requirements: Sequence[str]) -> None:
    """Find missing packages, of each extra and of those that are always needed."""
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        wanted = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        assert wanted is not None, f"a requirement starts with a name: {requirement!r}"
        absent = missing.setdefault(extra[1] if extra else "", [])
        if not _is_installed(wanted[1], wanted[2].strip()):
            absent.append(f"{wanted[1]}{wanted[2].strip()}")
    needed = missing.pop("", [])
    report.sections["extras"] = {"missing": dict(sorted(missing.items()))}
    if needed:
        report.problem(f"packages are missing, or of another version: {', '.join(needed)}", INSTALL)
    engines = {extra: missing[extra] for extra in ENGINE_EXTRAS if extra in missing}
    if engines and all(engines.values()):
        nearest = min(engines, key=lambda extra: len(engines[extra]))
        report.problem(
            f"the extra {nearest!r} is incomplete: {', '.join(engines[nearest])} is missing, or of another version",
            how_to_install(nearest),
        )


def _is_installed(name: str, specifier: str) -> bool:
    version = _version(name)
    if version is None:
        return False
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with vLLM
        return True
    return SpecifierSet(specifier).contains(version, prereleases=True)


def examine_vllm(report: Report) -> None:
    """Check vLLM's version, from what its distribution says."""
    providers = sorted(set(metadata.packages_distributions().get("vllm", ())))
    version = _version(providers[0]) if providers and _is_importable("vllm") else None
    report.sections["versions"] = {
        "python": sys.version.split()[0],
        "vllm": version,
        "supported_vllm": SUPPORTED_VLLM,
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "vllm_from": [f"{name} {_version(name)}" for name in providers],
    }
    examine_providers(report, providers, is_called_vllm="vllm" in providers)
    if version is None:
        report.problem("vLLM is not installed", INSTALL)
        return
    try:
        check_vllm_version(version)
    except MissingDependency as exc:
        what, _, remedy = str(exc).partition(": ")
        report.problem(what, remedy)


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def examine_platform(report: Report) -> None:
    """Import vLLM, and check the platform that it detects, and the devices."""
    try:
        from vllm.platforms import current_platform
    except Exception as exc:
        report.problem(f"vLLM cannot be imported: {type(exc).__name__}: {_first_line(exc)}", INSTALL)
        return
    device_type = current_platform.device_type
    report.sections["platform"] = {"name": type(current_platform).__name__, "device_type": device_type}
    if not device_type:
        report.problem(
            "vLLM recognises no platform here: its build fits no device of this machine",
            "install the CPU build (the extra `cpu`) where there is no GPU; for a GPU, check that its driver works",
        )
        return
    from vllm_omni.worker.platforms import find_platform

    try:
        find_platform(device_type)
    except ConfigError as exc:
        report.problem(str(exc), "use a machine of one of these platforms, or install a package that adds this one")
    if device_type == "cuda":
        _examine_gpus(report)


def examine_providers(report: Report, providers: Sequence[str], *, is_called_vllm: bool) -> None:
    """Check which distributions install the package ``vllm``: there should be one, called ``vllm``."""
    if len(providers) > 1:
        report.problem(
            f"several distributions have the package vllm, {' and '.join(providers)}: files of one replace another's",
            f"{sys.executable} -m pip uninstall {' '.join(providers)}; then, {INSTALL}",
        )
    elif providers and not is_called_vllm:
        report.warn(
            f"no distribution is called vllm, but {providers[0]}: vLLM's own commands (without --omni) do not start",
            f"in the checkout of this project: {sys.executable} requirements/fix_cpu_env.py",
        )


def _examine_gpus(report: Report) -> None:
    import torch

    gpus = {}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus[str(index)] = {"index": index, "name": name, "memory_bytes": total, "free_bytes": free}
    report.sections["gpus"] = gpus
    if not gpus:
        report.problem(
            "torch finds no GPU", "check that CUDA_VISIBLE_DEVICES names one, and that torch is built for CUDA"
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
