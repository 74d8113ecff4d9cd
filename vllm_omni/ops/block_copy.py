"""Copies between scattered blocks and one buffer: pages of a slab, and blocks of a KV cache of many layers.

Each copy has two paths with the same result: the library of ``csrc``, one for each platform, which ``make native``
builds, and operations of torch, which are always there. A call takes the one that was measured to be faster
(docs/performance.md); ``path`` asks for one of them.

On CUDA a copy is put on the current stream. There the flat side may also be pinned host memory, which the library's
kernel reads or writes in place; it must live until the copy is done.

Indices are int64, on the CPU, contiguous; one that occurs twice when scattering leaves either of the two. Source and
destination may not overlap.

From: Omni-Flow section 4.1.2, the conversion between the NHD block stack and the flat layout.
"""

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from vllm_omni.ops import native

CopyPath = Literal["native", "torch"]

# Up to here torch copies the pages, or one part of one layer, on one thread, however many it has: the library, which
# always takes one, is faster then by what torch's operations cost besides the copy.
_ONE_THREAD_BYTES = 512 * 1024


class BlockStack:
    """A KV cache as attention kernels hold it, checked once for any number of copies.

    A layer is a tensor [P, B, N, H, D]: P parts, which are K and V, or one where both lie in D; B blocks of N tokens,
    H heads of D numbers. [N, H, D] is contiguous (NHD); P and B lie in any order (``layer.transpose(0, 1)``) and with
    gaps or without, in all layers alike. The flat form is [num, L, P, N, H, D], contiguous: one run of bytes a block.

    Raises:
        ValueError: no layers, or one that is not like this.
    """

    def __init__(self, layers: Sequence[Tensor]):
        if not layers:
            raise ValueError("a stack of 0 layers: must be at least 1")
        first = layers[0]
        if first.dim() != 5 or not first.numel():
            raise ValueError(f"layer 0 is {_describe(first)}: must be [parts, blocks, N, H, D], none of them 0")
        for number, layer in enumerate(layers):
            if _describe(layer) != _describe(first) or layer.stride() != first.stride():
                what = [f"{_describe(one)} with strides {one.stride()}" for one in (layer, first)]
                raise ValueError(f"layer {number} is {what[0]}: must be like layer 0, {what[1]}")
        self.num_layers = len(layers)
        self.num_parts, self.num_blocks = first.shape[:2]
        self.flat_shape = (self.num_layers, self.num_parts, *first.shape[2:])  # of one block
        self.dtype, self.device = first.dtype, first.device
        part_stride, block_stride = (stride * first.itemsize for stride in first.stride()[:2])
        self.run_bytes = run_bytes = prod(first.shape[2:]) * first.itemsize
        strides = ((self.num_parts, part_stride), (self.num_blocks, block_stride))
        lie_apart = all(count == 1 or stride >= run_bytes for count, stride in strides)
        if not first[0, 0].is_contiguous() or not lie_apart:
            raise ValueError(f"strides {first.stride()} of layers of shape {tuple(first.shape)}: must be those of NHD")
        rows = [layer[part].flatten(1) for layer in layers for part in range(self.num_parts)]
        self.unit = _unit(*rows)
        self.rows = [row.view(self.unit) for row in rows]  # L * P times [B, units]
        pointers = (ctypes.c_void_p * self.num_layers)(*(layer.data_ptr() for layer in layers))
        sizes = (self.num_layers, self.num_parts, self.num_blocks, part_stride, block_stride, run_bytes)
        self.native = ctypes.pointer(native.Stack(pointers, *sizes))


def gather_pages(source: Tensor, pages: Tensor, out: Tensor, *, path: CopyPath | None = None) -> None:
    """``out[i] = source[pages[i]]``.

    Args:
        source: [slots, ...]; each page is contiguous.
        pages: [num]
        out: [num, ...], contiguous.

    Raises:
        ValueError: a tensor or an index is not like this.
        MissingDependency: ``path`` is "native", and there is no library for the device.
    """
    _copy_pages(True, source, pages, out, path)


def scatter_pages(source: Tensor, pages: Tensor, target: Tensor, *, path: CopyPath | None = None) -> None:
    """``target[pages[i]] = source[i]``: ``gather_pages`` back, with the same shapes and errors."""
    _copy_pages(False, target, pages, source, path)


def nhd_to_flat(stack: BlockStack, blocks: Tensor, flat: Tensor, *, path: CopyPath | None = None) -> None:
    """``flat[i, l, p] = layers[l][p, blocks[i]]``.

    Args:
        blocks: [num]
        flat: [num, L, P, N, H, D], contiguous.

    Raises:
        ValueError: a tensor or an index is not like this.
        MissingDependency: ``path`` is "native", and there is no library for the device.
    """
    _copy_blocks(True, stack, blocks, flat, path)


def flat_to_nhd(flat: Tensor, blocks: Tensor, stack: BlockStack, *, path: CopyPath | None = None) -> None:
    """``layers[l][p, blocks[i]] = flat[i, l, p]``: ``nhd_to_flat`` back, with the same shapes and errors."""
    _copy_blocks(False, stack, blocks, flat, path)


def _copy_pages(gathers: bool, slots: Tensor, pages: Tensor, flat: Tensor, path: CopyPath | None) -> None:
    shape, strides = slots.shape, slots.stride()
    size = prod(shape[1:])
    if len(shape) < 2 or not slots[:1].is_contiguous() or (shape[0] > 1 and strides[0] < size):
        raise ValueError(f"pages of {_describe(slots)}, strides {strides}: must be [slots, ...], each contiguous")
    _check_indices("page", pages, shape[0])
    _check_flat(flat, (pages.numel(), *shape[1:]), slots.dtype, slots.device)
    if not flat.numel():
        return
    rows, flat_rows = slots.flatten(1), flat.view(-1, size)
    unit = _unit(rows, flat_rows)
    # Many bytes torch gathers as fast, and scatters as fast on several threads, if not byte by byte.
    scatters_slowly = not gathers and (unit == torch.uint8 or torch.get_num_threads() == 1)
    library = _choose(path, slots.device, faster=flat.nbytes <= _ONE_THREAD_BYTES or scatters_slowly)
    if library is None:
        _copy_torch(gathers, [rows.view(unit)], pages, flat_rows.view(unit).unsqueeze(1))
        return
    name = "omni_gather_pages" if gathers else "omni_scatter_pages"
    to, source = (flat, slots) if gathers else (slots, flat)
    sizes = pages.numel(), size * slots.itemsize, strides[0] * slots.itemsize, shape[0]
    native.call(library, name, slots.device, to.data_ptr(), source.data_ptr(), pages.data_ptr(), *sizes)


def _copy_blocks(gathers: bool, stack: BlockStack, blocks: Tensor, flat: Tensor, path: CopyPath | None) -> None:
    _check_indices("block", blocks, stack.num_blocks)
    _check_flat(flat, (len(blocks), *stack.flat_shape), stack.dtype, stack.device)
    if not flat.numel():
        return
    takes_one_thread = len(blocks) * stack.run_bytes <= _ONE_THREAD_BYTES or torch.get_num_threads() == 1
    library = _choose(path, stack.device, faster=takes_one_thread)
    if library is None:
        flat_rows = flat.view(len(flat), len(stack.rows), -1)
        unit = stack.unit if _unit(flat_rows) == torch.complex128 else torch.uint8
        rows = stack.rows if unit == stack.unit else [row.view(unit) for row in stack.rows]
        _copy_torch(gathers, rows, blocks, flat_rows.view(unit))
        return
    name = "omni_nhd_to_flat" if gathers else "omni_flat_to_nhd"
    native.call(library, name, stack.device, flat.data_ptr(), stack.native, blocks.data_ptr(), len(blocks))


def _copy_torch(gathers: bool, rows: Sequence[Tensor], indices: Tensor, flat: Tensor) -> None:
    """The twin of all four: ``flat[i, r] = rows[r][indices[i]]``, or back."""
    device = rows[0].device
    staged = flat
    if device.type != "cpu":
        indices = indices.to(device, non_blocking=True)
        if flat.device != device:  # pinned
            staged = torch.empty_like(flat, device=device) if gathers else flat.to(device, non_blocking=True)
    for row, part in zip(rows, staged.unbind(1), strict=True):
        if gathers:
            torch.index_select(row, 0, indices, out=part)
        else:
            row.index_copy_(0, indices, part)
    if gathers and staged is not flat:
        flat.copy_(staged, non_blocking=True)


def _unit(*tensors: Tensor) -> torch.dtype:
    """As what torch is to copy the rows: element by element it does, so the larger the faster. 16 bytes if they fit."""
    for tensor in tensors:
        numbers = tensor.storage_offset() | tensor.stride(0) | tensor.size(-1)
        if (tensor.data_ptr() | numbers * tensor.itemsize) % 16:
            return torch.uint8
    return torch.complex128


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _check_indices(what: str, indices: Tensor, count: int) -> None:
    if (
        indices.dtype != torch.int64
        or indices.dim() != 1
        or indices.device.type != "cpu"
        or not indices.is_contiguous()
    ):
        raise ValueError(f"{what} indices are {_describe(indices)}: must be int64 (num,) on cpu, contiguous")
    if len(indices):
        for index in map(int, torch.aminmax(indices)):
            if not 0 <= index < count:
                raise ValueError(f"{what} index {index}: must be at least 0 and below {count}")


def _check_flat(flat: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    elsewhere = flat.device != device and not (device.type == "cuda" and flat.device.type == "cpu" and flat.is_pinned())
    if flat.shape != shape or flat.dtype != dtype or elsewhere or not flat.is_contiguous():
        wanted = f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
        raise ValueError(f"the flat side is {_describe(flat)}, strides {flat.stride()}: must be {wanted}, contiguous")


def _choose(path: CopyPath | None, device: torch.device, faster: bool) -> ctypes.CDLL | None:
    """The library, or None for torch. On CUDA nothing was measured yet: there the library must be asked for."""
    if path is None:
        return native.find(device.type) if faster and device.type == "cpu" else None
    if path not in ("native", "torch"):
        raise ValueError(f"path {path!r}: must be 'native', 'torch' or None")
    return native.require(device.type) if path == "native" else None
