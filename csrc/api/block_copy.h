// The C ABI of the block copies: libvllm_omni_cpu.so. Called by vllm_omni/ops/native.py.
//
// A page is `page_bytes` contiguous bytes. Pages lie side by side in the flat buffer, and `page_stride` bytes apart in
// the slab, which has `num_slots` of them.
//
// Each function returns 0, or a code that omni_error_text explains; then nothing was copied. If an index occurs twice,
// scattering leaves one of the two pages.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)  // everything else is hidden

extern "C" {

// Changes with any signature here; a program compares it when it loads the library.
int64_t omni_block_copy_abi();

const char* omni_error_text(int code);

// flat[i] = slab[pages[i]]
int omni_gather_pages(void* flat, const void* slab, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                      int64_t page_stride, int64_t num_slots);

// slab[pages[i]] = flat[i]
int omni_scatter_pages(void* slab, const void* flat, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                       int64_t page_stride, int64_t num_slots);
}

#pragma GCC visibility pop
