#include <cuda_runtime.h>

#include <algorithm>

#include "../block_copy.h"

namespace omni {
namespace {

// Layers and indices ride in the kernel's arguments, of which there are 4 KiB: no copy to the device before the
// launch, and nothing to keep alive until it has run. More of them take more launches.
constexpr int64_t kMaxLayers = 128;
constexpr int64_t kMaxBlocks = 320;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kUnitsPerThread = 8;  // of a piece: loads in flight

struct Arguments {
  Strides strides;  // num_layers: of this launch
  char* flat;
  int64_t flat_block_bytes;  // of all layers
  int64_t num_blocks;
  char* layers[kMaxLayers];
  int64_t blocks[kMaxBlocks];
};
static_assert(sizeof(Arguments) <= 4096, "the arguments of a kernel");

// A warp takes a piece of a run at a time: 32 neighbouring units are one transaction, and the divisions that find a
// run are made once for a piece.
template <typename Unit, bool kGathers>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Arguments args) {
  const Strides& strides = args.strides;
  const int64_t units = strides.run_bytes / sizeof(Unit);
  const int64_t units_per_piece = kWarp * kUnitsPerThread;
  const int64_t pieces = (units + units_per_piece - 1) / units_per_piece;
  const int64_t total = pieces * args.num_blocks * strides.num_layers * strides.num_parts;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp; item < total;
       item += num_warps) {
    const Run run = run_at(strides, item / pieces);
    const int64_t row = run.layer * strides.num_parts + run.part;
    Unit* flat = reinterpret_cast<Unit*>(args.flat + run.block * args.flat_block_bytes + row * strides.run_bytes);
    Unit* stacked = reinterpret_cast<Unit*>(args.layers[run.layer] +
                                            offset_in_layer(strides, run, args.blocks[run.block]));
    const Unit* from = kGathers ? stacked : flat;
    Unit* to = kGathers ? flat : stacked;
    const int64_t first = (item % pieces) * units_per_piece + lane;
    Unit held[kUnitsPerThread];  // all are read before one is written, for the compiler cannot know that sides differ
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      if (first + i * kWarp < units) held[i] = from[first + i * kWarp];
    }
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      if (first + i * kWarp < units) to[first + i * kWarp] = held[i];
    }
  }
}

template <typename Unit>
cudaError_t launch(Direction direction, const Arguments& args, int max_grid, cudaStream_t stream) {
  const int64_t units = args.strides.run_bytes / sizeof(Unit);
  const int64_t pieces = (units + kWarp * kUnitsPerThread - 1) / (kWarp * kUnitsPerThread);
  const int64_t warps = pieces * args.num_blocks * args.strides.num_layers * args.strides.num_parts;
  const int grid = static_cast<int>(std::min<int64_t>((warps * kWarp + kThreads - 1) / kThreads, max_grid));
  if (direction == Direction::kGather) {
    copy_kernel<Unit, true><<<grid, kThreads, 0, stream>>>(args);
  } else {
    copy_kernel<Unit, false><<<grid, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

bool is_aligned(const omni_block_stack& stack, const void* flat) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(flat) | stack.part_stride | stack.block_stride | stack.run_bytes;
  for (int64_t layer = 0; layer < stack.num_layers; ++layer) bits |= reinterpret_cast<uintptr_t>(stack.layers[layer]);
  return bits % sizeof(uint4) == 0;
}

}  // namespace

int copy_blocks(Direction direction, const omni_block_stack& stack, void* flat, const int64_t* blocks, int64_t num,
                void* stream) {
  int device, num_multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return kPlatform + error;
  const int max_grid = 8 * num_multiprocessors;  // fills the device; the kernel strides over the rest
  const auto launch_units = is_aligned(stack, flat) ? launch<uint4> : launch<uint8_t>;
  const int64_t layer_bytes = stack.num_parts * stack.run_bytes;
  Arguments args;
  args.flat_block_bytes = stack.num_layers * layer_bytes;
  for (int64_t layer = 0; layer < stack.num_layers; layer += kMaxLayers) {
    const int64_t num_layers = std::min(stack.num_layers - layer, kMaxLayers);
    args.strides = {num_layers, stack.num_parts, stack.part_stride, stack.block_stride, stack.run_bytes};
    for (int64_t i = 0; i < num_layers; ++i) args.layers[i] = static_cast<char*>(stack.layers[layer + i]);
    for (int64_t block = 0; block < num; block += kMaxBlocks) {
      args.num_blocks = std::min(num - block, kMaxBlocks);
      args.flat = static_cast<char*>(flat) + block * args.flat_block_bytes + layer * layer_bytes;
      std::copy_n(blocks + block, args.num_blocks, args.blocks);
      error = launch_units(direction, args, max_grid, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return kPlatform + error;
    }
  }
  return kOk;
}

const char* platform_error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace omni
