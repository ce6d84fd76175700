// Convolutions with 3 x 3 x 3 filters, or 3 x 3 for images, that sweep a tile of the image along its planes: one plane
// after another is copied to shared memory, with a halo of lines and columns, and is read by all filter taps from there.
#pragma once

#include "pipeline.cuh"
#include "sweep_tiles.cuh"

namespace mbc {

constexpr int SWEEP_WARPS = CONSUMERS * WARPGROUP / 32;  // of the consumers
constexpr int MOST_BOX_VOXELS = (SWEEP_LINES + 2) * (SWEEP_VOXELS / SWEEP_LINES + 2);  // with the halo of 3 x 3 taps

// Calls `run` with the one of these numbers that is equal to `number`; returns whether there is one.
template <int... NUMBERS, typename Run>
bool run_with_one_of(int64_t number, const Run& run) {
  return ((number == NUMBERS && (run(std::integral_constant<int, NUMBERS>{}), true)) || ...);
}

// Whether setmaxnreg ends: threads start with 168 registers, and two warpgroups of consumers wait for ever for more than
// the producer returns.
constexpr bool passes_registers(int producer, int consumer) { return CONSUMERS * (consumer - 168) <= 168 - producer; }

// The part of one thread of a warpgroup in copies of a box of 8 EIGHTS channels, for all planes of a tile.
template <typename T, int EIGHTS>
class BoxCopy {
 public:
  __device__ BoxCopy(const T* tensor, const SweptTensor& t, const SweepTile& tile, int32_t first_channel)
      : row(tensor + tile.row * t.planes * t.lines * t.columns * t.channels + first_channel),
        plane(t.lines * t.columns * t.channels) {
    const int32_t thread = threadIdx.x % WARPGROUP, eight = thread % EIGHTS;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int32_t voxel = thread / EIGHTS + i * STRIDE, line = voxel / t.box_columns, column = voxel - line * t.box_columns;
      const int32_t y = tile.line - t.pad_lines + line, x = tile.column - t.pad_columns + column;
      const bool exists = y >= 0 && y < t.lines && x >= 0 && x < t.columns;
      from[i] = exists ? (y * t.columns + x) * t.channels + eight * 8 : -1;
      const bool copies = thread < STRIDE * EIGHTS && voxel < t.box_lines * t.box_columns;
      to[i] = copies ? (line * EIGHTS + eight) * t.chunk_pitch() + column * 16 : -1;
    }
  }
  // Starts the copies of a plane: zeros outside of the tensor, and for planes that do not exist.
  __device__ void start(int32_t number, bool exists, char* box) const {
    const T* const begin = row + static_cast<int64_t>(exists ? number : 0) * plane;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (to[i] >= 0)
        cp_async_16(reinterpret_cast<uint4*>(box + to[i]), begin + max(from[i], 0), exists && from[i] >= 0);
  }
  // Bit i says whether chunk i of the thread is in the tensor, rather than zeros around it.
  __device__ uint32_t chunks_inside() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) bits |= static_cast<uint32_t>(to[i] >= 0 && from[i] >= 0) << i;
    return bits;
  }
  __device__ int32_t place(int chunk) const { return to[chunk]; }  // bytes in the box

  static constexpr int STRIDE = WARPGROUP / EIGHTS, COUNT = (MOST_BOX_VOXELS + STRIDE - 1) / STRIDE;

 private:
  const T* row;
  int32_t plane;                    // elements
  int32_t from[COUNT], to[COUNT];  // elements in the plane, and bytes in the box; -1: none
};

// What a producer does to the planes that it copies: nothing. `Thread` is what a thread keeps of the planes that it has
// begun to copy, of 8 EIGHTS channels from `first_channel` on, and it tells consumers which planes are complete.
struct AsStored {
  template <typename T, int EIGHTS, int STAGES>
  struct Thread {
    Pipeline<STAGES>& pipeline;
    __device__ Thread(const AsStored&, Pipeline<STAGES>& pipeline_, char*, int32_t, int32_t) : pipeline(pipeline_) {}
    __device__ void begin(const SweepTile&, const BoxCopy<T, EIGHTS>&) {}
    // After the copies of a plane were started; `exists`: whether the plane is in the tensor.
    __device__ void started(int32_t iteration, const BoxCopy<T, EIGHTS>&, bool) {
      pipeline.full[iteration % STAGES].cp_async_arrive();
    }
    __device__ void finish() {}
  };
};

}  // namespace mbc
