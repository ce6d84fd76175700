// Filter gradients of stem convolutions: prefetching rows of gradients, and adding the parts of warps and blocks
// (split-K).
#pragma once

#include "split_k.cuh"
#include "stem_conv.cuh"

namespace mbc {

constexpr int STEM_MOST_THREADS = STEM_STEPS / 2 * 32, STEM_STAGES = 3;
// More threads than a block has, so that the compiler uses at most 65,536 / 512 = 128 registers: a multiprocessor then
// has room for three blocks of five warps (windows of 7 x 7), where a few more registers leave room for two.
constexpr int STEM_THREADS_OF_128_REGISTERS = 512;
static_assert(STEM_MOST_THREADS <= STEM_THREADS_OF_128_REGISTERS, "blocks are no larger");

// Copies 16 bytes to shared memory, or zeros if they are not `there`; `wide`: they are aligned.
template <typename T>
__device__ inline void copy_vector(uint4* to, const T* from, bool there, bool wide) {
  if (wide) {
    cp_async_16(to, from, there);
  } else {
    T* one = reinterpret_cast<T*>(to);
#pragma unroll
    for (int e = 0; e < WIDTH<T>; ++e) one[e] = there ? from[e] : from_float<T>(0.0f);
  }
}

// The next row of gradients that a block is going to need, across tiles, and its stage in the pipeline in shared
// memory.
struct RowsAhead {
  int64_t number;
  int32_t row, stage;
  StemTile tile;

  __device__ explicit RowsAhead(const StemConv& f)
      : number(blockIdx.x), row(0), stage(0), tile(f.tile(blockIdx.x)) {}
  // A pixel has V times 16 bytes, of filters from `first` on; `offset_of(pixel, v)`: their offset in a stage.
  template <int V, int STAGE, typename T, typename Offset>
  __device__ void fetch(const T* dy, uint4* ring, const StemConv& f, int32_t first, Offset offset_of) {
    if (number < f.tiles) {
      const int32_t v = threadIdx.x % V, pixel_stride = blockDim.x / V;  // a thread keeps its filters
      const T* from =
          dy + ((tile.n * f.out_height + tile.y0 + row) * f.out_width + tile.x0) * f.filters + first + v * WIDTH<T>;
      for (int32_t pixel = threadIdx.x / V; pixel < tile.across * 16; pixel += pixel_stride) {
        const bool inside = pixel < tile.columns;
        copy_vector(ring + stage * STAGE + offset_of(pixel, v), from + (inside ? pixel * f.filters : 0), inside, f.wide);
      }
      stage = stage + 1 == STEM_STAGES ? 0 : stage + 1;
      if (++row == tile.rows) {
        number += gridDim.x;
        row = 0;
        tile = f.tile(number);
      }
    }
    cp_async_commit();
  }
};

// The partial filter gradients of blocks, [parts, elements of a window, filters].
struct FilterParts {
  int32_t elements, filters;
  int32_t rows, run, padded_run;  // of a window; elements of a row of the filter, and padded

  explicit FilterParts(const StemConv& f) : FilterParts(f, f.steps * 16, f.padded_run) {}
  FilterParts(const StemConv& f, int32_t elements_, int32_t padded_run_)
      : elements(elements_), filters(f.filters), rows(f.window_rows), run(f.run), padded_run(padded_run_) {}
  // Its index without padding.
  FilterParts(int32_t elements_, int32_t filters_)
      : elements(elements_), filters(filters_), rows(1), run(elements_), padded_run(elements_) {}
  // Where element `i` of a part is in the gradient, which is [filters, rows, run]; -1: padding of a window.
  __device__ int64_t operator()(int64_t i) const {
    const int32_t element = static_cast<int32_t>(i / filters), filter = static_cast<int32_t>(i - element * filters);
    const int32_t row = element / padded_run, at = element - row * padded_run;
    return row < rows && at < run ? (static_cast<int64_t>(filter) * rows + row) * run + at : -1;
  }
  // Adds parts to a launch's third operand.
  void add(const MbcCall& call, const float* partial, int64_t parts, bool accumulate) const {
    add_parts(call.stream, partial, out<float>(call, 2), static_cast<int64_t>(elements) * filters, parts, accumulate, *this);
  }
};

// Stores the partial filter gradient of a block: two tiles of 16 elements of the window a warp; warps that divided
// pixels are added in order, through `shared`.
template <int TILES>
__device__ inline void write_part(
    float (&sums)[2][TILES][4], float* shared, float* partial, const StemConv& f, int32_t group, int32_t sharer,
    int32_t first) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* exchanged = shared + group * 64 * TILES * 4 + lane;
  for (int32_t from = 1; from < f.sharers(); ++from) {
    __syncthreads();
    if (sharer == from) {
#pragma unroll
      for (int v = 0; v < 8 * TILES; ++v) exchanged[v * 32] = sums[v / 4 / TILES][v / 4 % TILES][v % 4];
    }
    __syncthreads();
    if (sharer == 0) {
#pragma unroll
      for (int v = 0; v < 8 * TILES; ++v) sums[v / 4 / TILES][v / 4 % TILES][v % 4] += exchanged[v * 32];
    }
  }
  if (sharer != 0) return;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t element = (2 * group + m) * 16 + g + 8 * h;
      if (element >= f.steps * 16) continue;
      float* to = partial + (static_cast<int64_t>(blockIdx.x) * f.steps * 16 + element) * f.filters + first + 2 * t;
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        store(to + 8 * j, Vec<float, 2>{{sums[m][j][2 * h], sums[m][j][2 * h + 1]}});
    }
}

}  // namespace mbc
