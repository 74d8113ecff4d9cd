#include "block_copy.h"

#include "../kernels/block_copy.h"

namespace omni {
namespace {

enum Code : int { kOk, kNull, kSize, kStride, kOverflow, kIndex, kOverlap };

bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return first < second + static_cast<uintptr_t>(b_bytes) && second < first + static_cast<uintptr_t>(a_bytes);
}

Code check(const void* slab, const void* flat, const int64_t* pages, int64_t num_pages, const Layout& layout) {
  if (num_pages < 0 || layout.page_bytes < 1 || layout.num_slots < 1) return kSize;
  if (slab == nullptr || flat == nullptr || pages == nullptr) return kNull;
  if (layout.page_stride < 0 || (layout.num_slots > 1 && layout.page_stride < layout.page_bytes)) return kStride;
  int64_t slab_bytes, flat_bytes;
  if (__builtin_mul_overflow(layout.num_slots - 1, layout.page_stride, &slab_bytes) ||
      __builtin_add_overflow(slab_bytes, layout.page_bytes, &slab_bytes) ||
      __builtin_mul_overflow(num_pages, layout.page_bytes, &flat_bytes)) {
    return kOverflow;
  }
  if (overlap(slab, slab_bytes, flat, flat_bytes)) return kOverlap;
  for (int64_t i = 0; i < num_pages; ++i) {
    if (pages[i] < 0 || pages[i] >= layout.num_slots) return kIndex;
  }
  return kOk;
}

}  // namespace
}  // namespace omni

int64_t omni_block_copy_abi() { return 2; }

const char* omni_error_text(int code) {
  switch (code) {
    case omni::kOk: return "no error";
    case omni::kNull: return "a pointer is null";
    case omni::kSize: return "a size or a count is negative, or zero where nothing can be zero";
    case omni::kStride: return "a stride is smaller than a page";
    case omni::kOverflow: return "the sizes are more than 64 bits can address";
    case omni::kIndex: return "an index is out of range";
    case omni::kOverlap: return "source and destination overlap";
    default: return "unknown code";
  }
}

int omni_gather_pages(void* flat, const void* slab, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                      int64_t page_stride, int64_t num_slots) {
  if (num_pages == 0) return omni::kOk;
  const omni::Layout layout{page_bytes, page_stride, num_slots};
  const omni::Code code = omni::check(slab, flat, pages, num_pages, layout);
  if (code == omni::kOk) omni::gather(static_cast<char*>(flat), static_cast<const char*>(slab), pages, num_pages, layout);
  return code;
}

int omni_scatter_pages(void* slab, const void* flat, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                       int64_t page_stride, int64_t num_slots) {
  if (num_pages == 0) return omni::kOk;
  const omni::Layout layout{page_bytes, page_stride, num_slots};
  const omni::Code code = omni::check(slab, flat, pages, num_pages, layout);
  if (code == omni::kOk) omni::scatter(static_cast<char*>(slab), static_cast<const char*>(flat), pages, num_pages, layout);
  return code;
}
