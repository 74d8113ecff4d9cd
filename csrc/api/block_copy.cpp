#include "block_copy.h"

#include <cstddef>

#include "../kernels/block_copy.h"

namespace omni {
namespace {

// False on overflow; none of the sizes is negative.
bool multiply(int64_t a, int64_t b, int64_t* result) { return !__builtin_mul_overflow(a, b, result); }
bool add(int64_t a, int64_t b, int64_t* result) { return !__builtin_add_overflow(a, b, result); }

bool sizes_of(const omni_block_stack& stack, int64_t num, int64_t* layer_bytes, int64_t* flat_bytes) {
  int64_t parts, blocks;
  return multiply(stack.num_parts - 1, stack.part_stride, &parts) &&
         multiply(stack.num_blocks - 1, stack.block_stride, &blocks) && add(parts, blocks, layer_bytes) &&
         add(*layer_bytes, stack.run_bytes, layer_bytes) && multiply(num, stack.num_layers, flat_bytes) &&
         multiply(*flat_bytes, stack.num_parts, flat_bytes) && multiply(*flat_bytes, stack.run_bytes, flat_bytes);
}

bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return first < second + static_cast<uintptr_t>(b_bytes) && second < first + static_cast<uintptr_t>(a_bytes);
}

Code check(const omni_block_stack& stack, const void* flat, const int64_t* blocks, int64_t num) {
  if (stack.num_layers < 1 || stack.num_parts < 1 || stack.num_blocks < 1 || stack.run_bytes < 1) return kSize;
  const bool parts_lie_apart = stack.num_parts == 1 || stack.part_stride >= stack.run_bytes;
  const bool blocks_lie_apart = stack.num_blocks == 1 || stack.block_stride >= stack.run_bytes;
  if (!parts_lie_apart || !blocks_lie_apart || stack.part_stride < 0 || stack.block_stride < 0) return kStride;
  int64_t layer_bytes, flat_bytes;
  if (!sizes_of(stack, num, &layer_bytes, &flat_bytes)) return kOverflow;
  for (int64_t layer = 0; layer < stack.num_layers; ++layer) {
    if (stack.layers[layer] == nullptr) return kNull;
    if (overlap(stack.layers[layer], layer_bytes, flat, flat_bytes)) return kOverlap;
  }
  for (int64_t i = 0; i < num; ++i) {
    if (blocks[i] < 0 || blocks[i] >= stack.num_blocks) return kIndex;
  }
  return kOk;
}

int copy(Direction direction, const omni_block_stack* stack, void* flat, const int64_t* blocks, int64_t num,
         void* stream) {
  if (num == 0) return kOk;
  if (num < 0) return kSize;
  if (stack == nullptr || stack->layers == nullptr || flat == nullptr || blocks == nullptr) return kNull;
  const Code code = check(*stack, flat, blocks, num);
  return code == kOk ? copy_blocks(direction, *stack, flat, blocks, num, stream) : code;
}

}  // namespace
}  // namespace omni

using omni::Direction;

int64_t omni_block_copy_abi() { return 1; }

const char* omni_error_text(int code) {
  switch (code) {
    case omni::kOk: return "no error";
    case omni::kNull: return "a pointer is null";
    case omni::kSize: return "a size or a count is negative, or zero where nothing can be zero";
    case omni::kStride: return "a stride is smaller than what lies there";
    case omni::kOverflow: return "the sizes are more than 64 bits can address";
    case omni::kIndex: return "an index is out of range";
    case omni::kOverlap: return "source and destination overlap";
    default: return code > omni::kPlatform ? omni::platform_error_text(code - omni::kPlatform) : "unknown code";
  }
}

// Pages are a stack of one layer and one part. Neither side's const is lost: the direction says which one is written.
int omni_gather_pages(void* dst, const void* src, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                      int64_t page_stride, int64_t num_slots, void* stream) {
  void* const layers[] = {const_cast<void*>(src)};
  const omni_block_stack stack{layers, 1, 1, num_slots, 0, page_stride, page_bytes};
  return omni::copy(Direction::kGather, &stack, dst, pages, num_pages, stream);
}

int omni_scatter_pages(void* dst, const void* src, const int64_t* pages, int64_t num_pages, int64_t page_bytes,
                       int64_t page_stride, int64_t num_slots, void* stream) {
  void* const layers[] = {dst};
  const omni_block_stack stack{layers, 1, 1, num_slots, 0, page_stride, page_bytes};
  return omni::copy(Direction::kScatter, &stack, const_cast<void*>(src), pages, num_pages, stream);
}

int omni_nhd_to_flat(void* flat, const omni_block_stack* stack, const int64_t* blocks, int64_t num, void* stream) {
  return omni::copy(Direction::kGather, stack, flat, blocks, num, stream);
}

int omni_flat_to_nhd(const void* flat, const omni_block_stack* stack, const int64_t* blocks, int64_t num,
                     void* stream) {
  return omni::copy(Direction::kScatter, stack, const_cast<void*>(flat), blocks, num, stream);
}
