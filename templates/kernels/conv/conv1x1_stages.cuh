// Which products a launch of convolutions of one place makes (see conv1x1.cuh), which tiles of them a block, and
// where it keeps what in shared memory.
#pragma once

#include "smem_operands.cuh"
#include "pipeline.cuh"

struct PointwiseArguments {
  int64_t type;
  int64_t pixels;
  int64_t channels;
  int64_t filters;
  int64_t blocks;  // no more than tiles, and not those that a GPU has room for, so that sums are the same on all
  int64_t stages;  // of 64 channels of a tile's pixels, that there is room for; even
  int64_t beside;  // tiles of what is read for sums, likewise
};

struct PointwiseAlongArguments : PointwiseArguments {
  int64_t affine;  // whether what is normalised again has scale and shift
};

struct PointwisePairArguments : PointwiseAlongArguments {
  int64_t gradient_channels;  // of the second product; `channels` are those of the first
};

struct PointwiseNormalizeArguments : PointwiseAlongArguments {
  int64_t count;  // elements of a channel in the whole mini-batch
};

namespace mbc {

// As in mbc/kernels/cuda/conv/conv1x1.py: what a block makes at once, and channels of a stage.
constexpr int POINT_PIXELS = 64, POINT_FILTERS = 128, POINT_CHANNELS = 64;
constexpr int POINT_MULTIPLIERS = 2, POINT_WRITERS = 2;  // warpgroups
constexpr int POINT_THREADS = (1 + POINT_MULTIPLIERS + POINT_WRITERS) * WARPGROUP;
constexpr int BESIDE_COPIERS = WARPGROUP / 2;  // threads that copy what lies beside results, if anything does
// 480 for a thread of each warpgroup, of which each starts with 96.
constexpr int POINT_COPIER_REGISTERS = 64, POINT_MULTIPLIER_REGISTERS = 104, POINT_WRITER_REGISTERS = 104;
constexpr int POINT_EIGHTS = POINT_FILTERS / 8;                       // of filters, one a thread that writes
constexpr int POINT_ROWS = POINT_WRITERS * WARPGROUP / POINT_EIGHTS;  // pixels that are written at once
constexpr int RESULT_ROW = POINT_FILTERS * 2;                         // bytes of a pixel's results

struct PointRings {
  static constexpr int MOST_STAGES = 12, RESULTS = POINT_MULTIPLIERS, MOST_BESIDE = 6;
  Barrier kept;  // until all weights are there
  // Each multiplier has every other stage for its own, so that none waits for one that the other has not been through,
  // and a tile of results.
  Ring<MOST_STAGES> pixels;
  Ring<RESULTS> results;
  Ring<MOST_BESIDE> beside;
};
// Where results of a pixel lie: the same eight filters of neighbouring ones in different banks.
__device__ inline int32_t result_offset(int32_t row, int32_t eight) {
  return row * RESULT_ROW + ((eight ^ row % 8) * 16);
}

constexpr int KEPT_BYTES = POINT_FILTERS * OPERAND_ROW;  // of weights of 64 channels
constexpr int STAGE_BYTES = POINT_PIXELS * OPERAND_ROW;
constexpr int RESULT_BYTES = POINT_PIXELS * RESULT_ROW;
template <Makes M, typename S>
constexpr int BESIDE_BYTES = POINT_PIXELS * POINT_FILTERS / 8 * (16 * TILES_BESIDE<M, S> + SIGNS_BESIDE<S>);
template <Makes M, typename S>
constexpr int POINT_COPIERS = (BESIDE<M, S> ? WARPGROUP - BESIDE_COPIERS : WARPGROUP) / POINT_MULTIPLIERS;  // for each

// [pixels, channels] by weights.
template <bool BACKWARD_, typename T>
struct Product {
  static constexpr bool BACKWARD = BACKWARD_;
  const T *pixels, *weights;
  int32_t channels;

  __host__ __device__ int32_t chunks() const { return (channels + POINT_CHANNELS - 1) / POINT_CHANNELS; }
};

// The same for a whole warp, which compilers see so only: barriers are reached by uniform registers.
__device__ inline int32_t warps_own(int32_t number) { return __shfl_sync(0xffffffffu, number, 0); }

// What a launch multiplies. `of` calls `run` with the product that a multiplier makes, and how many chunks of weights
// lie before those of it. Each of the SHARES in a product makes every so many-th tile.
template <Makes M, typename T>
struct Products {
  static constexpr int SHARES = POINT_MULTIPLIERS;
  Product<MAKES_GRADIENT<M>, T> one;

  __host__ __device__ int32_t chunks() const { return one.chunks(); }
  template <typename Run>
  __device__ void of(int32_t, const Run& run) const { run(one, 0); }
};
template <typename T>
struct Products<Makes::BOTH, T> {
  static constexpr int SHARES = 1;
  Product<false, T> x;
  Product<true, T> gradient;

  __host__ __device__ int32_t chunks() const { return x.chunks() + gradient.chunks(); }
  template <typename Run>
  __device__ void of(int32_t multiplier, const Run& run) const {
    if (multiplier == 0)
      run(x, 0);
    else
      run(gradient, x.chunks());
  }
};

template <Makes M, typename S, typename R>
struct Pointwise {
  int32_t pixels, filters, across, tiles;  // blocks of filters; tiles of pixels
  int32_t chunks, stages, besides;         // of weights that are kept; of the rings

  Pointwise(const PointwiseArguments& a, int32_t chunks_)
      : pixels(static_cast<int32_t>(a.pixels)), filters(static_cast<int32_t>(a.filters)),
        across(static_cast<int32_t>(divide_up(a.filters, POINT_FILTERS))),
        tiles(static_cast<int32_t>(divide_up(a.pixels, POINT_PIXELS))), chunks(chunks_),
        stages(static_cast<int32_t>(a.stages)), besides(static_cast<int32_t>(a.beside)) {}
  int shared_bytes() const {
    return chunks * KEPT_BYTES + stages * STAGE_BYTES + PointRings::RESULTS * RESULT_BYTES +
           besides * BESIDE_BYTES<M, S> + 1008;
  }
  // A block makes the same filters of one tile after another.
  __device__ int32_t first_filter() const { return static_cast<int32_t>(blockIdx.x) % across * POINT_FILTERS; }
  __device__ int32_t place() const { return static_cast<int32_t>(blockIdx.x) / across; }  // among blocks of its filters
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / across; }
  __device__ int32_t count() const { return (tiles - place() - 1) / step() + 1; }
  // The first pixel of one of a block's tiles. Sums go from the last one to the first, as by themselves: the launch
  // before may have left them in the cache, and the one behind begins with those.
  __device__ int32_t first_pixel(int32_t number) const {
    const int32_t tile = place() + number * step();
    return (SUMMING<R> ? tiles - 1 - tile : tile) * POINT_PIXELS;
  }
};

// What a block has in shared memory, from a multiple of 1,024 bytes on.
template <Makes M, typename S>
struct PointStages {
  char *kept, *pixels, *results, *beside;

  template <typename R>
  __device__ PointStages(char* first, const Pointwise<M, S, R>& f)
      : kept(first), pixels(kept + f.chunks * KEPT_BYTES), results(pixels + f.stages * STAGE_BYTES),
        beside(results + PointRings::RESULTS * RESULT_BYTES) {}
  __device__ char* of_pixels(const Turn& turn) const { return pixels + turn.stage * STAGE_BYTES; }
  __device__ char* of_results(const Turn& turn) const { return results + turn.stage * RESULT_BYTES; }
  __device__ char* of_beside(const Turn& turn) const { return beside + turn.stage * BESIDE_BYTES<M, S>; }
};

}  // namespace mbc
