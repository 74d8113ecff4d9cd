#include "../block_copy.h"

#include <cstring>

namespace omni {

int copy_blocks(Direction direction, const omni_block_stack& stack, void* flat, const int64_t* blocks, int64_t num,
                void*) {
  const Strides strides{stack.num_layers, stack.num_parts, stack.part_stride, stack.block_stride, stack.run_bytes};
  const int64_t num_runs = num * stack.num_layers * stack.num_parts;
  for (int64_t number = 0; number < num_runs; ++number) {
    const Run run = run_at(strides, number);
    char* stacked = static_cast<char*>(stack.layers[run.layer]) + offset_in_layer(strides, run, blocks[run.block]);
    char* flattened = static_cast<char*>(flat) + number * stack.run_bytes;
    if (direction == Direction::kGather) {
      std::memcpy(flattened, stacked, stack.run_bytes);
    } else {
      std::memcpy(stacked, flattened, stack.run_bytes);
    }
  }
  return kOk;
}

const char* platform_error_text(int) { return "unknown code"; }

}  // namespace omni
