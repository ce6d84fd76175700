// The 1x1 convolutions of conv1x1.cuh: their arguments, the GEMMs of a launch, the tiles of a block, and the layout of
// its shared memory.
#pragma once

#include "smem_operands.cuh"
#include "pipeline.cuh"
#include "tensor_map.cuh"
#include "conv1x1_arguments.h"
#include "conv1x1_bn_backward_arguments.h"
#include "dual_conv1x1_arguments.h"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/conv1x1.py: a tile, and channels of a stage.
constexpr int CONV1X1_PIXELS = 64, CONV1X1_FILTERS = 128, CONV1X1_CHANNELS = 64;
constexpr int CONV1X1_CONSUMERS = 2, CONV1X1_WRITERS = 2;  // warpgroups
constexpr int CONV1X1_THREADS = (1 + CONV1X1_CONSUMERS + CONV1X1_WRITERS) * WARPGROUP;
// 480 registers for one thread of each warpgroup together; each thread starts with 96.
constexpr int CONV1X1_PRODUCER_REGISTERS = 64, CONV1X1_CONSUMER_REGISTERS = 104, CONV1X1_WRITER_REGISTERS = 104;
constexpr int CONV1X1_EIGHTS = CONV1X1_FILTERS / 8;                       // of filters; one for each epilogue thread
constexpr int CONV1X1_ROWS = CONV1X1_WRITERS * WARPGROUP / CONV1X1_EIGHTS;  // pixels that are stored together
constexpr int RESULT_ROW = CONV1X1_FILTERS * 2;                         // bytes of a pixel's results

struct Conv1x1Pipelines {
  static constexpr int MOST_STAGES = 12, RESULTS = CONV1X1_CONSUMERS, MOST_STAGED = 6;
  Barrier kept;  // all weights have arrived
  // Each consumer has every second stage and its own tile of results, so that neither waits for the other.
  Pipeline<MOST_STAGES> pixels;
  Pipeline<RESULTS> results;
  Pipeline<MOST_STAGED> staged;
};
// Offset of eight filters of a pixel's results, swizzled so that neighbouring pixels have no bank conflicts.
__device__ inline int32_t result_offset(int32_t row, int32_t eight) {
  return row * RESULT_ROW + ((eight ^ row % 8) * 16);
}

constexpr int KEPT_BYTES = CONV1X1_FILTERS * SWIZZLE_ROW;  // weights of 64 channels
constexpr int STAGE_BYTES = CONV1X1_PIXELS * SWIZZLE_ROW;
constexpr int RESULT_BYTES = CONV1X1_PIXELS * RESULT_ROW;
template <GemmResult M, typename S>
constexpr int STAGED_BYTES = CONV1X1_PIXELS * CONV1X1_FILTERS / 8 * (16 * STAGED_TILES<M, S> + STAGED_MASK<S>);

// [pixels, channels] by weights, which are copied in boxes of 64 rows of 128 bytes.
template <bool BACKWARD_>
struct Gemm {
  static constexpr bool BACKWARD = BACKWARD_;
  static constexpr int BOX = SWIZZLE_ROW / 2;  // rows of a box, and elements of a row
  TensorMap pixels, weights;
  int32_t channels;

  __host__ __device__ int32_t chunks() const { return (channels + CONV1X1_CHANNELS - 1) / CONV1X1_CHANNELS; }
  template <typename T>
  const char* set(const T* image, const T* filters, const Conv1x1Arguments& a, int64_t channels_) {
    channels = static_cast<int32_t>(channels_);
    const auto make = [](TensorMap& map, const T* rows, int64_t count, int64_t columns) {
      return make_tensor_map(map, rows, sizeof(T), {columns, count}, {BOX, BOX}, true);
    };
    if (const char* problem = make(pixels, image, a.pixels, channels_)) return problem;
    return BACKWARD ? make(weights, filters, channels_, a.filters) : make(weights, filters, a.filters, channels_);
  }
};

// The GEMMs of a launch. `of` calls `run` with the GEMM of a consumer, and the number of chunks of weights before those
// of this GEMM. SHARES consumers divide the tiles of one GEMM.
template <GemmResult M>
struct Gemms {
  static constexpr int SHARES = CONV1X1_CONSUMERS;
  Gemm<COMPUTES_GRADIENT<M>> one;

  // Pixels and weights of each GEMM are the first operands.
  template <typename T>
  const char* set(const MbcCall& call) {
    const auto& a = arguments<Conv1x1Arguments>(call);
    return one.set(in<T>(call, 0), in<T>(call, 1), a, a.channels);
  }
  __host__ __device__ int32_t chunks() const { return one.chunks(); }
  template <typename Run>
  __device__ void of(int32_t, const Run& run) const { run(one, 0); }
};
template <>
struct Gemms<GemmResult::X_AND_GRADIENT> {
  static constexpr int SHARES = 1;
  Gemm<false> x;
  Gemm<true> gradient;

  template <typename T>
  const char* set(const MbcCall& call) {
    const auto& a = arguments<DualConv1x1Arguments>(call);
    if (const char* problem = x.set(in<T>(call, 0), in<T>(call, 1), a, a.channels)) return problem;
    return gradient.set(in<T>(call, 2), in<T>(call, 3), a, a.gradient_channels);
  }
  __host__ __device__ int32_t chunks() const { return x.chunks() + gradient.chunks(); }
  template <typename Run>
  __device__ void of(int32_t consumer, const Run& run) const {
    if (consumer == 0)
      run(x, 0);
    else
      run(gradient, x.chunks());
  }
};

// The staged operands of the epilogue, in the order of `each_staged`, which are copied in boxes of a tile.
template <GemmResult M, typename S>
struct StagedMaps {
  static constexpr int COUNT = STAGED_TILES<M, S> + STAGED_MASK<S>;
  TensorMap maps[COUNT > 0 ? COUNT : 1];

  struct Operand {
    const void* first;
    int bytes, packed;  // bytes of an element; elements for one address
  };
  struct Append {
    Operand*& next;
    template <typename Element>
    __host__ __device__ void operator()(const Element* operand) const {
      *next++ = {operand, sizeof(Element), PACKED<Element>};
    }
  };

  const char* set(S source, const Conv1x1Arguments& a) {
    Operand operands[COUNT > 0 ? COUNT : 1], *next = operands;
    each_staged<M>(source, Append{next});
    const char* problem = nullptr;
    for (int i = 0; i < COUNT && !problem; ++i) {
      const auto& [first, bytes, packed] = operands[i];
      problem = make_tensor_map(maps[i], first, bytes, {a.filters / packed, a.pixels},
                                {CONV1X1_FILTERS / packed, CONV1X1_PIXELS}, false);
    }
    return problem;
  }
};

template <GemmResult M, typename S, typename R>
struct Conv1x1 {
  int32_t pixels, filters, across, tiles;  // blocks of filters across; tiles of pixels
  int32_t chunks, stages, staged_tiles;         // chunks of weights that are kept; stages of the pipelines

  Conv1x1(const Conv1x1Arguments& a, int32_t chunks_)
      : pixels(static_cast<int32_t>(a.pixels)), filters(static_cast<int32_t>(a.filters)),
        across(static_cast<int32_t>(divide_up(a.filters, CONV1X1_FILTERS))),
        tiles(static_cast<int32_t>(divide_up(a.pixels, CONV1X1_PIXELS))), chunks(chunks_),
        stages(static_cast<int32_t>(a.stages)), staged_tiles(static_cast<int32_t>(a.staged_tiles)) {}
  int shared_bytes() const {
    return chunks * KEPT_BYTES + stages * STAGE_BYTES + Conv1x1Pipelines::RESULTS * RESULT_BYTES +
           staged_tiles * STAGED_BYTES<M, S> + 1008;
  }
  // A block computes the same filters of one tile of pixels after another.
  __device__ int32_t first_filter() const { return static_cast<int32_t>(blockIdx.x) % across * CONV1X1_FILTERS; }
  __device__ int32_t block_index() const { return static_cast<int32_t>(blockIdx.x) / across; }  // among blocks of its filters
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / across; }
  __device__ int32_t count() const { return (tiles - block_index() - 1) / step() + 1; }
  // The first pixel of one of a block's tiles. Reductions walk from the last tile to the first, as in
  // channel_reduce.cuh: the launch before may have left the last tiles in the cache, and the next launch begins with
  // the first ones.
  __device__ int32_t first_pixel(int32_t number) const {
    const int32_t tile = block_index() + number * step();
    return (REDUCES<R> ? tiles - 1 - tile : tile) * CONV1X1_PIXELS;
  }
};

// The shared memory of a block, from a multiple of 1,024 bytes on: weights, stages of pixels, results, staged operands.
template <GemmResult M, typename S>
struct Conv1x1Stages {
  char *kept, *pixels, *results, *staged;

  template <typename R>
  __device__ Conv1x1Stages(char* first, const Conv1x1<M, S, R>& f)
      : kept(first), pixels(kept + f.chunks * KEPT_BYTES), results(pixels + f.stages * STAGE_BYTES),
        staged(results + Conv1x1Pipelines::RESULTS * RESULT_BYTES) {}
  __device__ char* of_pixels(const PipelineState& state) const { return pixels + state.stage * STAGE_BYTES; }
  __device__ char* of_results(const PipelineState& state) const { return results + state.stage * RESULT_BYTES; }
  __device__ char* of_staged(const PipelineState& state) const { return staged + state.stage * STAGED_BYTES<M, S>; }
};

}  // namespace mbc
