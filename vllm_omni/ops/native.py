"""The library that ``make native`` compiles from ``csrc``: C functions over raw pointers, for the CPU.

It is optional: each of its functions has a twin of torch operations. It is loaded at its first use.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

from vllm_omni.errors import MissingDependency

logger = logging.getLogger(__name__)

DIRECTORY = Path(__file__).with_name("_native")
FILE = "libvllm_omni_cpu.so"
ABI = 2  # of csrc/api/block_copy.h

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p
_PAGES = [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE]
_ARGUMENTS = {"omni_gather_pages": _PAGES, "omni_scatter_pages": _PAGES}


@cache
def find() -> ctypes.CDLL | None:
    """Load the library; None if it was not built, or if it cannot be used, which is logged once."""
    file = DIRECTORY / FILE
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


def require() -> ctypes.CDLL:
    """Load the library; raises ``MissingDependency`` if there is none."""
    library = find()
    if library is None:
        raise MissingDependency(f"no {FILE} in {DIRECTORY}: `make native` builds it")
    return library


def call(library: ctypes.CDLL, name: str, *arguments: int) -> None:
    """Call a function; raises ``RuntimeError`` with the text of its error code."""
    if code := getattr(library, name)(*arguments):
        raise RuntimeError(f"{name}: {library.omni_error_text(code).decode()}")
