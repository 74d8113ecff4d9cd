"""vllm_omni: a server for any-to-any models, as a plugin of vLLM.

``OmniLLM`` (also ``Omni``), ``AsyncOmni`` and ``DiffusionParams`` are imported at first use: ``import vllm_omni``
itself needs no vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vllm_omni.compat import require_vllm, warn_of_namesake

__version__ = "0.1.0"

__all__ = ["AsyncOmni", "DiffusionParams", "Omni", "OmniLLM", "__version__"]

if TYPE_CHECKING:
    from vllm_omni.config.diffusion_params import DiffusionParams
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni_llm import OmniLLM

    Omni = OmniLLM


_LAZY = {
    "AsyncOmni": "vllm_omni.entrypoints.async_omni:AsyncOmni",
    "DiffusionParams": "vllm_omni.config.diffusion_params:DiffusionParams",
    "Omni": "vllm_omni.entrypoints.omni_llm:OmniLLM",
    "OmniLLM": "vllm_omni.entrypoints.omni_llm:OmniLLM",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "DiffusionParams":
        require_vllm(f"vllm_omni.{name}")
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(import_module(module), attribute)


warn_of_namesake()
