"""The libraries that ``make native`` compiles from ``csrc``, one for each platform: C functions over raw pointers.

None of them need be there. One is looked for when it is first asked for.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_omni.errors import MissingDependency

logger = logging.getLogger(__name__)

DIRECTORY = Path(__file__).with_name("_native")
ABI = 1  # of csrc/api/block_copy.h

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Stack(ctypes.Structure):
    """omni_block_stack of csrc/api/block_copy.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(_POINTER)),
        ("num_layers", _SIZE),
        ("num_parts", _SIZE),
        ("num_blocks", _SIZE),
        ("part_stride", _SIZE),
        ("block_stride", _SIZE),
        ("run_bytes", _SIZE),
    ]


_PAGES = [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER]
_BLOCKS = [_POINTER, ctypes.POINTER(Stack), _POINTER, _SIZE, _POINTER]
_ARGUMENTS = {
    "omni_gather_pages": _PAGES,
    "omni_scatter_pages": _PAGES,
    "omni_nhd_to_flat": _BLOCKS,
    "omni_flat_to_nhd": _BLOCKS,
}


@cache
def find(platform: str) -> ctypes.CDLL | None:
    """The library of a platform, "cpu" or "cuda"; None: it was not built, or cannot be used, which is logged once."""
    file = DIRECTORY / f"libvllm_omni_{platform}.so"
    if not file.exists():
        return None
    try:
        library = ctypes.CDLL(str(file))
        if (abi := library.omni_block_copy_abi()) != ABI:
            raise OSError(f"its ABI is {abi}, not {ABI}")
    except (OSError, AttributeError) as exc:
        logger.warning("%s is not used: %s. `make native` builds it again", file, exc)
        return None
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    library.omni_error_text.restype = ctypes.c_char_p
    return library


def require(platform: str) -> ctypes.CDLL:
    """Like ``find``; raises ``MissingDependency`` where there is none."""
    library = find(platform)
    if library is None:
        raise MissingDependency(f"no library for {platform} in {DIRECTORY}: `make native` builds it")
    return library


def call(library: ctypes.CDLL, name: str, device: torch.device, *arguments: Any) -> None:
    """Call a function, on CUDA with the current stream of the device; what it refuses is a ``RuntimeError``."""
    function = getattr(library, name)
    if device.type == "cuda":
        with torch.cuda.device(device):
            code = function(*arguments, torch.cuda.current_stream().cuda_stream)
    else:
        code = function(*arguments, None)
    if code:
        raise RuntimeError(f"{name}: {library.omni_error_text(code).decode()}")
