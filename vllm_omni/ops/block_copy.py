"""Copy pages between a slab and one contiguous buffer.

Each copy has two paths with the same result: the library of ``csrc`` (CPU only, built by ``make native``) and torch
operations. A call takes the one that was measured to be faster (docs/performance.md); ``path`` forces one of them.

Indices are int64, on the CPU, contiguous. If an index occurs twice, scattering leaves one of the two pages. Source and
destination must not overlap. On CUDA, a copy is enqueued on the current stream.
"""

import ctypes
from math import prod
from typing import Literal

import torch
from torch import Tensor

from vllm_omni.ops import native

CopyPath = Literal["native", "torch"]

# Up to this size torch copies on one thread, however many it has; the library, which always uses one thread, then wins
# because torch's operations have a higher fixed cost.
_ONE_THREAD_BYTES = 512 * 1024


def gather_pages(source: Tensor, pages: Tensor, out: Tensor, *, path: CopyPath | None = None) -> None:
    """Copy pages into one buffer: ``out[i] = source[pages[i]]``.

    Args:
        source: [slots, ...]; each page is contiguous.
        pages: [num]
        out: [num, ...], contiguous, on the device of ``source``.

    Raises:
        ValueError: a tensor or an index does not fit.
        MissingDependency: ``path`` is "native", and the library was not built.
    """
    _copy_pages(True, source, pages, out, path)


def scatter_pages(source: Tensor, pages: Tensor, target: Tensor, *, path: CopyPath | None = None) -> None:
    """Copy a buffer into pages: ``target[pages[i]] = source[i]``. Shapes and errors are those of ``gather_pages``."""
    _copy_pages(False, target, pages, source, path)


def _copy_pages(gathers: bool, slots: Tensor, pages: Tensor, flat: Tensor, path: CopyPath | None) -> None:
    shape, strides = slots.shape, slots.stride()
    size = prod(shape[1:])
    if len(shape) < 2 or not slots[:1].is_contiguous() or (shape[0] > 1 and strides[0] < size):
        raise ValueError(f"pages of {_describe(slots)}, strides {strides}: must be [slots, ...], each contiguous")
    _check_indices(pages, shape[0])
    _check_flat(flat, (pages.numel(), *shape[1:]), slots.dtype, slots.device)
    if not flat.numel():
        return
    rows, flat_rows = slots.flatten(1), flat.view(-1, size)
    unit = _copy_unit(rows, flat_rows)
    # Large gathers are as fast with torch; so are large scatters on several threads, unless they go byte by byte.
    scatters_slowly = not gathers and (unit == torch.uint8 or torch.get_num_threads() == 1)
    library = _choose(path, slots.device, is_faster=flat.nbytes <= _ONE_THREAD_BYTES or scatters_slowly)
    if library is None:
        rows, flat_rows, indices = rows.view(unit), flat_rows.view(unit), pages.to(slots.device)
        if gathers:
            torch.index_select(rows, 0, indices, out=flat_rows)
        else:
            rows.index_copy_(0, indices, flat_rows)
        return
    name = "omni_gather_pages" if gathers else "omni_scatter_pages"
    to, source = (flat, slots) if gathers else (slots, flat)
    sizes = pages.numel(), size * slots.itemsize, strides[0] * slots.itemsize, shape[0]
    native.call(library, name, to.data_ptr(), source.data_ptr(), pages.data_ptr(), *sizes)


def _copy_unit(*tensors: Tensor) -> torch.dtype:
    """Choose the dtype in which torch copies rows: 16 bytes at a time where they fit, since it goes item by item."""
    for tensor in tensors:
        numbers = tensor.storage_offset() | tensor.stride(0) | tensor.size(-1)
        if (tensor.data_ptr() | numbers * tensor.itemsize) % 16:
            return torch.uint8
    return torch.complex128


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _check_indices(pages: Tensor, num_slots: int) -> None:
    if pages.dtype != torch.int64 or pages.dim() != 1 or pages.device.type != "cpu" or not pages.is_contiguous():
        raise ValueError(f"page indices are {_describe(pages)}: must be int64 (num,) on cpu, contiguous")
    if len(pages):
        for index in map(int, torch.aminmax(pages)):
            if not 0 <= index < num_slots:
                raise ValueError(f"page index {index}: must be at least 0 and below {num_slots}")


def _check_flat(flat: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if flat.shape != shape or flat.dtype != dtype or flat.device != device or not flat.is_contiguous():
        wanted = f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
        raise ValueError(f"the flat side is {_describe(flat)}, strides {flat.stride()}: must be {wanted}, contiguous")


def _choose(path: CopyPath | None, device: torch.device, is_faster: bool) -> ctypes.CDLL | None:
    """Return the library, or None to copy with torch."""
    if path not in ("native", "torch", None):
        raise ValueError(f"path {path!r}: must be 'native', 'torch' or None")
    if path == "native":
        if device.type != "cpu":
            raise ValueError(f"path 'native' copies on the CPU, and the pages are on {device}")
        return native.require()
    return native.find() if path is None and is_faster and device.type == "cpu" else None
