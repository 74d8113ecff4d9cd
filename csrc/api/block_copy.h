// The C ABI of the block copies. libvllm_omni_cpu.so and libvllm_omni_cuda.so both export it: what `dst`, `src`,
// `layers` and `flat` point to is memory of that platform. All else, indices included, is host memory, which is read
// before a call returns.
//
// Each function answers 0, or a code that omni_error_text explains; then nothing was copied, unless the code is of a
// failed launch. An index that occurs twice when scattering leaves one of the two, on CUDA possibly parts of both.
//
// `stream` is a cudaStream_t: the copy is put on it, and the call returns at once. The CPU's copy is done on return.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)  // all else is hidden

extern "C" {

// A cache as attention kernels hold it: each layer is [num_parts, num_blocks, N, H, D], [N, H, D] contiguous (NHD:
// tokens of a block, heads, head size). The parts are K and V: 2, or 1 where both lie in D.
struct omni_block_stack {
  void* const* layers;   // [num_layers], where each layer begins
  int64_t num_layers;
  int64_t num_parts;
  int64_t num_blocks;
  int64_t part_stride;   // bytes from a part to the next
  int64_t block_stride;  // bytes from a block to the next
  int64_t run_bytes;     // of [N, H, D]
};

// Changes with any signature or struct here; who loads a library compares it.
int64_t omni_block_copy_abi();

const char* omni_error_text(int code);

// dst[i] = src[pages[i]]: pages of `page_bytes`, side by side in dst, `page_stride` bytes apart in src, which has
// `num_slots` of them.
int omni_gather_pages(void* dst, const void* src, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                      int64_t page_stride, int64_t num_slots, void* stream);

// dst[pages[i]] = src[i]; now dst has the slots.
int omni_scatter_pages(void* dst, const void* src, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                       int64_t page_stride, int64_t num_slots, void* stream);

// Flat is [num, num_layers, num_parts, N, H, D], contiguous: flat[i, l, p] = layers[l][p, blocks[i]].
int omni_nhd_to_flat(void* flat, const omni_block_stack* stack, const int64_t* blocks, int64_t num, void* stream);

// layers[l][p, blocks[i]] = flat[i, l, p].
int omni_flat_to_nhd(const void* flat, const omni_block_stack* stack, const int64_t* blocks, int64_t num, void* stream);
}

#pragma GCC visibility pop
