// Convolution in bf16 and fp16 of 32, 48 or 64 channels with 3 x 3 x 3 filters, or 3 x 3 for images, and a stride of
// one, forward and data gradient (decision 085). Channels last.
//
// GEMM       M = output voxels of a plane, N = 3 filter taps x filters, K = filter taps of a plane x channels.
// Tile       2 x 64 voxels x 3 x 32, 48 or 64 filters (plane_sweep.cuh). One plane of the image is multiplied by the
//            filters' three planes side by side: products for three output planes. The accumulators roll: once a plane
//            of the image is done, the first output plane is complete, and the others move up.
// Warps      384 threads. Warpgroup 0 is the producer: planes with cp.async, up to four ahead. Warpgroups 1 and 2 are
//            consumers of 64 voxels each: wgmma m64nNk16, voxels (A) and weights (B) in shared memory.
// Epilogue   filters are permuted so that a thread holds four neighbouring filters of a voxel, which it stores while
//            the wgmma of the other warpgroup run. A thread may also reduce what it stores, to statistics or to the sums
//            of a norm's gradient: each warp writes a state for each filter and tile, and a second kernel merges the
//            states in order.
// Shared     the weights of a block's filters, for its lifetime: at 3 x 3 x 3 taps, 32 channels and filters 55,872
//            bytes, at 64 channels 111,744; four planes with halo of 11,520 or 23,040 bytes.
// Registers  96 for a producer, 200 for a consumer thread (setmaxnreg).
// Limit      tensor cores: N = 96 takes 48 cycles, and 40 cycles of reads from shared memory; N = 192 96 and 64.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of 64 voxels x 3 N filters, for every 16 of them:
//
//                            filters  4t, 4t + 1    4t + 2, 4t + 3
//   voxel 16w + g                     d[2u][0, 1]   d[2u + 1][0, 1]
//   voxel 16w + g + 8                 d[2u][2, 3]   d[2u + 1][2, 3]
#pragma once

#include "plane_sweep.cuh"
#include "plane_sweep_conv_arguments.h"

namespace mbc {

constexpr int SWEEP_PRODUCER_REGISTERS = 96, SWEEP_CONSUMER_REGISTERS = 200;
constexpr int SWEEP_BLOCK_BYTES = 227 << 10;  // as in mbc/kernels/cuda/conv/plane_sweep_conv.py
static_assert(passes_registers(SWEEP_PRODUCER_REGISTERS, SWEEP_CONSUMER_REGISTERS));

template <int CHANNELS, int FILTERS, int LINES>
struct PlaneSweepConv : PlaneSweep {
  static constexpr int EIGHTS = CHANNELS / 8, UNITS = FILTERS / 16, TILES = SWEEP_TAPS * FILTERS / 8;
  // Core matrices of K = 8 of all filters and planes; the pitch avoids bank conflicts.
  static constexpr int KEPT_PITCH = SWEEP_TAPS * FILTERS * 16 + 16;  // as in mbc/kernels/cuda/conv/plane_sweep_conv.py
  // Weights and stages of a block.
  static constexpr int BOX_VOXELS = LINES == 1 ? SWEEP_VOXELS + SWEEP_TAPS - 1 : MOST_BOX_VOXELS;
  static constexpr int SHARED_BYTES = LINES * SWEEP_TAPS * EIGHTS * KEPT_PITCH + SWEEP_STAGES * BOX_VOXELS * CHANNELS * 2;
  static constexpr bool FITS = SHARED_BYTES <= SWEEP_BLOCK_BYTES;

  SweptTensor image;
  int32_t blocks_of_filters;
  bool backward;

  explicit PlaneSweepConv(const PlaneSweepConvArguments& a)
      : PlaneSweep(a, a.segment_planes), image(a, *this), blocks_of_filters(filters / FILTERS), backward(a.backward != 0) {}
  __device__ int32_t kept_bytes() const { return taps * EIGHTS * KEPT_PITCH; }
};

struct PlaneSweepPipelines {
  Pipeline<SWEEP_STAGES> planes;
  Barrier kept;  // the weights are complete
};

// The column of a filter among the columns of 16 filters.
__device__ inline int32_t column_of_filter(int32_t n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }

template <typename T, int CHANNELS, int FILTERS, int LINES>
__device__ inline void keep_planes_of_weights(const T* __restrict__ weight, char* kept, const PlaneSweepConv<CHANNELS, FILTERS, LINES>& f) {
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.blocks_of_filters * FILTERS, taps = SWEEP_TAPS * f.taps;
  for (int32_t i = threadIdx.x - WARPGROUP; i < taps * f.EIGHTS * FILTERS; i += CONSUMERS * WARPGROUP) {
    // Neighbouring threads read neighbouring elements.
    const int32_t n = f.backward ? i % FILTERS : i / f.EIGHTS / taps;
    const int32_t tap = f.backward ? i / FILTERS % taps : i / f.EIGHTS % taps;
    const int32_t eight = f.backward ? i / FILTERS / taps : i % f.EIGHTS;
    Vec<T, 8> k_vector;
    if (f.backward)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        k_vector.v[e] = weight[((eight * 8 + e) * taps + taps - 1 - tap) * f.filters + first + n];
    else
      k_vector = load<8>(weight + (((first + n) * taps + tap) * f.EIGHTS + eight) * 8);
    // The last plane of a filter is first: it completes an output plane.
    const int32_t column = (SWEEP_TAPS - 1 - tap / f.taps) * FILTERS + column_of_filter(n);
    store(reinterpret_cast<T*>(kept + (tap % f.taps * f.EIGHTS + eight) * f.KEPT_PITCH + column * 16), k_vector);
  }
}

template <typename T, int CHANNELS, int FILTERS, int LINES, typename Prologue>
__device__ inline void produce_planes(const T* __restrict__ x, char* stages, const Prologue& prologue,
                                      Pipeline<SWEEP_STAGES>& pipeline, const PlaneSweepConv<CHANNELS, FILTERS, LINES>& f) {
  typename Prologue::template Thread<T, CHANNELS / 8, SWEEP_STAGES> thread(prologue, pipeline, stages, f.image.box_bytes(f.EIGHTS), 0);
  int32_t iteration = 0;
  for (int64_t number = blockIdx.x / f.blocks_of_filters; number < f.tiles; number += gridDim.x / f.blocks_of_filters) {
    const SweepTile tile = f.tile(number);
    const BoxCopy<T, CHANNELS / 8> copy(x, f.image, tile, 0);
    thread.begin(tile, copy);
    for (int32_t plane = f.first(tile); plane < f.last(tile); ++plane, ++iteration) {
      pipeline.producer_acquire(iteration);
      copy.start(plane - f.pad_planes, true, stages + iteration % SWEEP_STAGES * f.image.box_bytes(f.EIGHTS));
      thread.started(iteration, copy, true);
    }
  }
  thread.finish();
}

// Starts all wgmma of a plane, for all filter taps.
template <typename T, int CHANNELS, int FILTERS, int LINES>
__device__ inline void start_plane(float (&sums)[SWEEP_TAPS * FILTERS / 8][4], const CoreMatrixDescriptor& voxels,
                                   const CoreMatrixDescriptor& weights, const PlaneSweepConv<CHANNELS, FILTERS, LINES>& f) {
  const int32_t chunk = f.image.chunk_pitch(), line = f.image.line_pitch(f.EIGHTS);
  wgmma_fence(sums);
#pragma unroll
  for (int tap = 0; tap < LINES * SWEEP_TAPS; ++tap)
#pragma unroll
    for (int step = 0; step < CHANNELS / 16; ++step)
      wgmma_ss<false, T>(sums, voxels.ahead(tap / SWEEP_TAPS * line + tap % SWEEP_TAPS * 16 + step * 2 * chunk),
                         weights.ahead((tap * f.EIGHTS + step * 2) * f.KEPT_PITCH), true);
  wgmma_commit();
}

// The place of element e of a thread among the filters that follow the thread's first one.
__device__ constexpr int32_t filter_of_element(int e) { return e / 4 * 16 + e % 4; }

// Where the results of an epilogue go: filters from `unit` on, of those of a thread, for the voxel at `offset`.
template <typename T>
struct InOneTensor {
  __device__ static T* target(T* y, int64_t offset, int unit) { return y + offset + unit * 16; }
};

// An epilogue that only stores. `Thread<UNITS>` is what a thread keeps of a tile, of 4 UNITS filters from `filter` on:
// it fetches operands of its voxels at `offsets` in a plane, and takes the results of each voxel as they are stored, two
// in a word. `table`: shared memory of the thread's warp, of TABLE_BYTES for each filter.
template <typename T>
struct StoreOnly {
  static constexpr int TABLE_BYTES = 0;
  template <int UNITS>
  struct Thread : InOneTensor<T> {
    __device__ Thread(const StoreOnly&, char*, int64_t, int32_t) {}
    __device__ void fetch(const StoreOnly&, int64_t, const int32_t (&)[2]) {}
    __device__ void push(const StoreOnly&, const uint32_t (&)[2 * UNITS], int) {}
    __device__ void finish(const StoreOnly&, int64_t, int32_t) const {}
  };
};

// Stores the results of a thread in one output plane; `offsets`: of its two voxels, -1 outside of the output.
template <typename T, int UNITS, int TILES, typename Target, typename Push>
__device__ inline void write_plane(
    const float (&sums)[TILES][4], const int32_t (&offsets)[2], const Target& target, const Push& push) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (offsets[h] >= 0) {
      uint32_t words[2 * UNITS];
#pragma unroll
      for (int i = 0; i < 2 * UNITS; ++i) words[i] = rounded_word<T>(sums[i] + 2 * h);
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
        *reinterpret_cast<uint2*>(target(offsets[h], unit)) = {words[2 * unit], words[2 * unit + 1]};
      push(words, h);
    }
}

// Moves the accumulators of the second and third output plane up.
template <int TILES>
__device__ inline void roll(float (&sums)[TILES][4]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v) sums[j][v] = j < TILES * 2 / SWEEP_TAPS ? sums[j + TILES / SWEEP_TAPS][v] : 0.0f;
}

template <typename T, int CHANNELS, int FILTERS, int LINES, typename Epilogue>
__device__ inline void consume_planes(const char* kept, const char* stages, char* tables, T* __restrict__ y, const Epilogue& epilogue,
                                      Pipeline<SWEEP_STAGES>& pipeline, const PlaneSweepConv<CHANNELS, FILTERS, LINES>& f) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, group = threadIdx.x / WARPGROUP - 1;
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.blocks_of_filters * FILTERS + lane % 4 * 4;
  const int32_t plane_elements = f.out_lines * f.out_columns * f.filters;
  const int32_t group_pitch = f.image.group_pitch(f.EIGHTS);
  const CoreMatrixDescriptor voxels({stages + group * 8 * group_pitch, group_pitch, f.image.chunk_pitch()});
  const CoreMatrixDescriptor weights({kept, 8 * 16, f.KEPT_PITCH});
  int32_t iteration = 0;
  for (int64_t number = blockIdx.x / f.blocks_of_filters; number < f.tiles; number += gridDim.x / f.blocks_of_filters) {
    const SweepTile tile = f.tile(number);
    int32_t offsets[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t eight = group * 8 + warp * 2 + h, line = eight * 8 / f.tile_columns;
      const int32_t at_line = tile.line + line, at_column = tile.column + eight * 8 - line * f.tile_columns + lane / 4;
      const bool exists = at_line < f.out_lines && at_column < f.out_columns;
      offsets[h] = exists ? (at_line * f.out_columns + at_column) * f.filters + first : -1;
    }
    const int64_t row = tile.row * f.out_planes;
    float sums[f.TILES][4] = {};
    typename Epilogue::template Thread<f.UNITS> of_tile(
        epilogue, tables + (group * WARPGROUP / 32 + warp) * FILTERS * Epilogue::TABLE_BYTES, number, first);
    const auto fetch = [&](int32_t plane) {
      if (plane >= tile.begin) of_tile.fetch(epilogue, (row + plane) * plane_elements, offsets);
    };
    const auto complete = [&](int32_t plane) {
      if (plane >= tile.begin)
        write_plane<T, f.UNITS>(
            sums, offsets,
            [&](int32_t offset, int unit) { return of_tile.target(y, (row + plane) * plane_elements + offset, unit); },
            [&](const auto& words, int h) { of_tile.push(epilogue, words, h); });
      roll(sums);
    };
    const int32_t last = f.last(tile);
    for (int32_t plane = f.first(tile); plane < last; ++plane, ++iteration) {
      fetch(plane - (SWEEP_TAPS - 1));  // before the wgmma, behind which the latency hides
      pipeline.consumer_wait(iteration);
      fence_proxy_async();
      start_plane<T>(sums, voxels.ahead(warp_uniform(iteration % SWEEP_STAGES * f.image.box_bytes(f.EIGHTS))), weights, f);
      wgmma_wait(sums);
      pipeline.consumer_release(iteration);
      complete(plane - (SWEEP_TAPS - 1));
    }
    // Output planes whose last planes are padding are left.
    for (int32_t plane = last - (SWEEP_TAPS - 1); plane < tile.end; ++plane) {
      fetch(plane);
      complete(plane);
    }
    of_tile.finish(epilogue, number, first);
  }
}

template <typename T, int CHANNELS, int FILTERS, int LINES, typename Prologue, typename Epilogue>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    plane_sweep_conv(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, Epilogue epilogue,
                     PlaneSweepConv<CHANNELS, FILTERS, LINES> f, Prologue prologue) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ PlaneSweepPipelines pipelines;
  char* const kept = reinterpret_cast<char*>(shared);
  char* const tables = kept + f.kept_bytes();
  char* const stages = tables + SWEEP_WARPS * FILTERS * Epilogue::TABLE_BYTES;
  if (threadIdx.x == 0) {
    pipelines.kept.start(CONSUMERS * WARPGROUP);
    pipelines.planes.start(WARPGROUP);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<SWEEP_PRODUCER_REGISTERS>();
    produce_planes(x, stages, prologue, pipelines.planes, f);
  } else {
    setmaxnreg_inc<SWEEP_CONSUMER_REGISTERS>();
    keep_planes_of_weights(weight, kept, f);
    fence_proxy_async();
    pipelines.kept.arrive();
    pipelines.kept.wait(0);
    consume_planes(kept, stages, tables, y, epilogue, pipelines.planes, f);
  }
}

// LINES: lines of a filter, 1 for flat sweeps. Filters of a block that do not fit in shared memory are not compiled.
template <int LINES, typename T, typename Prologue, typename Epilogue>
const char* run_plane_sweep(const MbcCall& call, const PlaneSweepConvArguments& a, const T* x, const T* weight, T* y,
                            const Prologue& prologue, const Epilogue& epilogue) {
  if (const char* problem = unaligned(call)) return problem;
  if ((a.flat != 0) != (LINES == 1)) return "flat sweeps have a launcher of their own, and so have volumes";
  const char* problem = "there are neither 32 nor 48 nor 64 channels";
  const auto run = [&](auto channels, auto filters) {
    using Sweep = PlaneSweepConv<channels, filters, LINES>;
    if constexpr (Sweep::FITS) {
      const Sweep f(a);
      const int64_t blocks_of_filters = a.filters / filters, most = max(int64_t{1}, multiprocessors() / blocks_of_filters);
      const int shared = Sweep::SHARED_BYTES + SWEEP_WARPS * filters * Epilogue::TABLE_BYTES;
      MBC_LAUNCH_SHARED((plane_sweep_conv<T, channels, filters, LINES, Prologue, Epilogue>),
                        static_cast<unsigned>(min(f.tiles, most) * blocks_of_filters), PIPELINE_THREADS, shared, call.stream, x,
                        weight, y, epilogue, f, prologue);
      problem = launched();
    }
  };
  run_with_one_of<32, 48, 64>(a.channels, [&](auto channels) {
    problem = "neither 32 nor 48 nor 64 filters of a block fit";
    run_with_one_of<32, 48, 64>(a.block_filters, [&](auto filters) { run(channels, filters); });
  });
  return problem;
}

// Without a prologue: the first accesses are the image and the weights.
template <int LINES, typename T, typename Epilogue>
const char* run_plane_sweep(const MbcCall& call, const PlaneSweepConvArguments& a, T* y, const Epilogue& epilogue) {
  return run_plane_sweep<LINES>(call, a, in<T>(call, 0), in<T>(call, 1), y, AsStored{}, epilogue);
}

}  // namespace mbc
