// Copies of pages; the arguments are checked (api/block_copy.cpp).
#pragma once

#include <cstdint>

namespace omni {

struct Layout {
  int64_t page_bytes;
  int64_t page_stride;  // bytes from one page of the slab to the next
  int64_t num_slots;    // pages of the slab
};

void gather(char* flat, const char* slab, const int64_t* pages, int64_t num_pages, const Layout& layout);
void scatter(char* slab, const char* flat, const int64_t* pages, int64_t num_pages, const Layout& layout);

}  // namespace omni
