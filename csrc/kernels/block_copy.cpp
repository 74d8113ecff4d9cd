#include "block_copy.h"

#include <cstring>

namespace omni {

void gather(char* flat, const char* slab, const int64_t* pages, int64_t num_pages, const Layout& layout) {
  for (int64_t i = 0; i < num_pages; ++i) {
    std::memcpy(flat + i * layout.page_bytes, slab + pages[i] * layout.page_stride, layout.page_bytes);
  }
}

void scatter(char* slab, const char* flat, const int64_t* pages, int64_t num_pages, const Layout& layout) {
  for (int64_t i = 0; i < num_pages; ++i) {
    std::memcpy(slab + pages[i] * layout.page_stride, flat + i * layout.page_bytes, layout.page_bytes);
  }
}

}  // namespace omni
