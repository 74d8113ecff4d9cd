"""vllm_omni: a server for any-to-any models, as a plugin of vLLM.

``OmniLLM`` (also ``Omni``), ``AsyncOmni`` and ``DiffusionParams`` are imported at first use: ``import vllm_omni``
itself needs no vLLM.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["AsyncOmni", "DiffusionParams", "Omni", "OmniLLM", "__version__"]

if TYPE_CHECKING:
    from vllm_omni.config.diffusion_params import DiffusionParams
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni_llm import OmniLLM

    Omni = OmniLLM


def __getattr__(name: str) -> object:
    if name == "DiffusionParams":
        from vllm_omni.config.diffusion_params import DiffusionParams

        return DiffusionParams
    if name not in ("AsyncOmni", "Omni", "OmniLLM"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_omni.compat import require_vllm

    require_vllm(f"vllm_omni.{name}")
    if name == "AsyncOmni":
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        return AsyncOmni
    from vllm_omni.entrypoints.omni_llm import OmniLLM

    return OmniLLM
