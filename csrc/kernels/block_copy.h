// What the block copies of both platforms share: where a run lies in the stack and in the flat buffer.
#pragma once

#include <cstdint>

#include "../api/block_copy.h"

#ifdef __CUDACC__
#define OMNI_HOST_DEVICE __host__ __device__
#else
#define OMNI_HOST_DEVICE
#endif

namespace omni {

enum class Direction { kGather, kScatter };  // stack to flat; flat to stack

enum Code : int { kOk, kNull, kSize, kStride, kOverflow, kIndex, kOverlap, kPlatform };  // kPlatform + its own code

// Copied into a kernel's arguments, unlike omni_block_stack, whose layers are a pointer to host memory.
struct Strides {
  int64_t num_layers, num_parts, part_stride, block_stride, run_bytes;
};

// The bytes that are contiguous on both sides: one part of one layer of one block. Numbered as they lie in the flat
// buffer: run i begins there at i * run_bytes.
struct Run {
  int64_t block;  // which of the indices
  int64_t layer;
  int64_t part;
};

OMNI_HOST_DEVICE inline Run run_at(const Strides& strides, int64_t number) {
  const int64_t row = number / strides.num_parts;
  return {row / strides.num_layers, row % strides.num_layers, number % strides.num_parts};
}

OMNI_HOST_DEVICE inline int64_t offset_in_layer(const Strides& strides, const Run& run, int64_t index) {
  return run.part * strides.part_stride + index * strides.block_stride;
}

// One for each platform; the arguments are checked.
int copy_blocks(Direction direction, const omni_block_stack& stack, void* flat, const int64_t* blocks, int64_t num,
                void* stream);
const char* platform_error_text(int code);

}  // namespace omni
