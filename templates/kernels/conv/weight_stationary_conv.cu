// Convolution in bf16 and fp16 of 64 or 128 channels with filters of several taps, forward and data gradient, at a
// stride of one; optionally with batch statistics in the epilogue. Weights stay in shared memory for the life of a
// block. Channels last; filters are a multiple of 64.
//
// GEMM       M = filters, N = output pixels, K = filter taps * channels.
// Tile       64 filters x 256 pixels (halo.cuh). A pipeline stage is the halo of a tile with all of 64 channels, or
//            with 32 of 128, whose weights leave less shared memory. The operand of the next filter tap is the same
//            halo, shifted by some pixels: core matrices without swizzle may begin at any multiple of 16 bytes.
// Warps      384 threads, a ping-pong schedule. Warpgroup 0 is the producer: halos with cp.async, up to three ahead.
//            Warpgroups 1 and 2 are consumers, each of every second tile: wgmma m64n256k16, weights (A) and pixels (B)
//            in shared memory. While one rounds, stores and reduces its tile, tensor cores work for the other.
// Epilogue   results are transposed in the shared memory of their halo, then stored by rows of 64 filters, 16 bytes a
//            thread.
// Shared     3 halos of 48,512 bytes (128 channels: 24,256), and 1,040 bytes for 8 K of 64 filters: at 3 x 3 taps
//            74,880 bytes for 64 channels, 149,760 for 128.
// Registers  168 for each thread; with statistics 72 for a producer and 216 for a consumer thread (setmaxnreg).
// Limit      tensor cores, 1.25 times their bound at 64 channels and filters (decision 033).
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of 64 filters x 256 pixels, j = 0 .. 31:
//
//                           pixels   8j + 2t   8j + 2t + 1
//   row 16w + g: filter 16w + 2g     d[j][0]     d[j][1]        rows are permuted (`row_of_filter`), so that
//   row 16w + g + 8: 16w + 2g + 1    d[j][2]     d[j][3]        a thread has two neighbouring filters of a pixel
#include "halo.cuh"
#include "thread_statistics.cuh"
#include "weight_stationary_conv_arguments.h"

namespace mbc {

constexpr int STATIONARY_HALOS = 3;  // equal to the constant in mbc/kernels/cuda/conv/weight_stationary_conv.py

template <int CHANNELS>
struct WeightStationaryConv : HaloConv {
  static constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS_REDUCING = 216;  // 64 K registers; threads start with 168
  // Chunks of 8 channels, of all channels and of a halo; pixels that are copied together.
  static constexpr int ALL = CHANNELS / 8, EIGHTS = CHANNELS == 64 ? 8 : 4, COPY_STRIDE = WARPGROUP / EIGHTS;
  static constexpr int HALOS = ALL / EIGHTS, HALO_BYTES = MOST_HALO_PIXELS * EIGHTS * 16;
  // Core matrices of K = 8 of all filters; the pitch avoids bank conflicts.
  static constexpr int KEPT_PITCH = HALO_FILTERS * 16 + 16;  // as in mbc/kernels/cuda/conv/weight_stationary_conv.py
  // Results are staged in the halo from which they were computed, as many pixels at a time as fit, in rows of 64
  // filters.
  static constexpr int ROUNDS = 8 / EIGHTS, ROUND_PIXELS = HALO_GROUPS * 8 / ROUNDS;
  static constexpr int RESULT_PITCH = HALO_FILTERS * 2 + 16, RESULT_STRIDE = WARPGROUP / 8;
  static_assert(ROUND_PIXELS * RESULT_PITCH <= HALO_BYTES);

  GridPixel input_step, output_step;  // from one pixel of a thread to its next pixel

  explicit WeightStationaryConv(const HaloArguments& a)
      : HaloConv(a), input_step(locate(COPY_STRIDE)), output_step(locate(RESULT_STRIDE / 8 * group)) {}
};

struct WeightStationaryPipelines {
  Pipeline<STATIONARY_HALOS> halos;
  Barrier kept;                  // this warpgroup has started all wgmma of a tile
  Barrier started[CONSUMERS];  // all wgmma of a tile, by this warpgroup
  Barrier warpgroup_barrier[CONSUMERS];  // for the warps of this warpgroup; an even number of phases for each tile

  __device__ void start() {
    kept.start(CONSUMERS * WARPGROUP);
    for (int group = 0; group < CONSUMERS; ++group) {
      started[group].start(WARPGROUP / 32);
      warpgroup_barrier[group].start(WARPGROUP / 32);
    }
    halos.start(WARPGROUP, 1);
  }
};

// Filters 2 i and 2 i + 1 of 16 are rows i and i + 8 of the tile, so that a thread holds two neighbouring filters.
__device__ inline int32_t row_of_filter(int32_t n) { return n / 16 * 16 + n % 2 * 8 + n % 16 / 2; }

template <typename T, int CHANNELS>
__device__ inline void keep_weights(const T* __restrict__ weight, char* kept, const WeightStationaryConv<CHANNELS>& f) {
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.across * HALO_FILTERS;
  for (int32_t i = threadIdx.x - WARPGROUP; i < f.taps * f.ALL * HALO_FILTERS; i += CONSUMERS * WARPGROUP) {
    // Neighbouring threads read neighbouring elements.
    const int32_t tap = i / (f.ALL * HALO_FILTERS), n = f.backward ? i % HALO_FILTERS : i / f.ALL % HALO_FILTERS;
    const int32_t eight = f.backward ? i / HALO_FILTERS % f.ALL : i % f.ALL;
    Vec<T, 8> k_vector;
    if (f.backward)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        k_vector.v[e] = weight[((eight * 8 + e) * f.taps + f.taps - 1 - tap) * f.filters + first + n];
    else
      k_vector = load<8>(weight + (((first + n) * f.taps + tap) * f.ALL + eight) * 8);
    store(reinterpret_cast<T*>(kept + (tap * f.ALL + eight) * f.KEPT_PITCH + row_of_filter(n) * 16), k_vector);
  }
}

template <typename T, int CHANNELS>
__device__ inline void produce_halos(
    const T* __restrict__ x, char* halos, Pipeline<STATIONARY_HALOS>& pipeline, const WeightStationaryConv<CHANNELS>& f) {
  const int32_t eight = threadIdx.x % f.EIGHTS, mine = threadIdx.x / f.EIGHTS, halo_pixels = f.halo_pixels();
  int32_t iteration = 0;
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x) {
    const int32_t left = f.left(tile);
    for (int32_t halo = 0; halo < f.HALOS; ++halo, ++iteration) {
      const T* from = x + (halo * f.EIGHTS + eight) * 8;
      char* to = halos + iteration % STATIONARY_HALOS * f.HALO_BYTES + eight * f.chunk_pitch;
      GridPixel at = f.first_halo_pixel(tile, mine);
      pipeline.producer_acquire(iteration);
      for (int32_t i = mine; i < halo_pixels; i += f.COPY_STRIDE) {
        const int32_t offset = f.input_offset(at, left);
        cp_async_16(reinterpret_cast<uint4*>(to + i * 16), from + max(offset, 0), offset >= 0);
        f.advance(at, f.input_step);
      }
      pipeline.full[iteration % STATIONARY_HALOS].cp_async_arrive();
    }
  }
}

// Starts all wgmma of a halo; calls `while_running` after the first group.
template <typename T, int CHANNELS, typename WhileRunning>
__device__ inline void start_halo(
    float (&sums)[32][4], const char* kept, const char* line, bool adds, const WeightStationaryConv<CHANNELS>& f,
    WhileRunning while_running) {
  for (int32_t tap = 0, across = 0; tap < f.taps; ++tap, kept += f.ALL * f.KEPT_PITCH) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < f.EIGHTS / 2; ++step) {
      const CoreMatrices weights{kept, 8 * 16, f.KEPT_PITCH, step * 2 * f.KEPT_PITCH};
      const CoreMatrices image{line, f.group * 16, f.chunk_pitch, across * 16 + step * 2 * f.chunk_pitch};
      wgmma_ss<false, T>(sums, weights, image, adds || tap + step > 0);
    }
    wgmma_commit();
    if (tap == 0) while_running();
    if (++across == f.kernel_width) {
      across = 0;
      line += f.pitch * 16;
    }
  }
}

// `partial`: the statistics' states of each warp, with STATISTICS.
template <typename T, int CHANNELS, bool STATISTICS>
__device__ inline void consume_tiles(
    const char* kept, char* halos, T* __restrict__ y, typename Statistics<T>::State* partial,
    WeightStationaryPipelines& pipelines, const WeightStationaryConv<CHANNELS>& f) {
  const int32_t thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  const int32_t group = threadIdx.x / WARPGROUP - 1, eight = thread % 8, mine = thread / 8;
  const auto arrive = [&](Barrier& barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  };
  const auto warpgroup_sync = [&](uint32_t parity) {
    arrive(pipelines.warpgroup_barrier[group]);
    pipelines.warpgroup_barrier[group].wait(parity);
  };
  const int32_t first = static_cast<int32_t>(blockIdx.x) % f.across * HALO_FILTERS;
  y += first + eight * 8;
  ThreadStatistics<T, 8> statistics;
  const int32_t step = static_cast<int32_t>(gridDim.x);
  int32_t number = group;  // number of the block's tile; this warpgroup takes every second one
  for (int32_t tile = blockIdx.x + group * step; tile < f.tiles; tile += CONSUMERS * step, number += CONSUMERS) {
    float sums[32][4];
    char* halo = nullptr;
    int32_t iteration = number * f.HALOS;
    for (int32_t i = 0; i < f.HALOS; ++i, ++iteration) {
      halo = halos + iteration % STATIONARY_HALOS * f.HALO_BYTES;
      pipelines.halos.consumer_wait(iteration);
      fence_proxy_async();
      if (i == 0 && number > 0) pipelines.started[(number - 1) % CONSUMERS].wait((number - 1) / CONSUMERS % 2);
      start_halo<T>(sums, kept + i * f.EIGHTS * f.KEPT_PITCH, halo, i > 0, f, [&] {
        if (i == 0) return;
        wgmma_wait<1>(sums);
        pipelines.halos.consumer_release(iteration - 1);
      });
    }
    arrive(pipelines.started[group]);
    wgmma_wait(sums);
    const int32_t left = f.left(tile);
    GridPixel at = f.locate(f.first(tile) + mine / 8 * f.group + mine % 8);
    char* const results = halo + warp * 16 * 2 + lane / 4 * 4;
#pragma unroll
    for (int round = 0; round < f.ROUNDS; ++round) {
      warpgroup_sync(0);  // the halo has been read
#pragma unroll
      for (int j = 0; j < f.ROUND_PIXELS / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float(&of)[4] = sums[round * f.ROUND_PIXELS / 8 + j];
          const float two[2] = {of[e], of[2 + e]};
          const int32_t pixel = j * 8 + lane % 4 * 2 + e;
          *reinterpret_cast<uint32_t*>(results + pixel * f.RESULT_PITCH) = rounded_word<T>(two);
        }
      warpgroup_sync(1);
#pragma unroll 4
      for (int32_t i = mine; i < f.ROUND_PIXELS; i += f.RESULT_STRIDE) {
        const int32_t offset = f.output_offset(at, left);
        const auto packed = hold<8>(reinterpret_cast<const T*>(halo + i * f.RESULT_PITCH) + eight * 8);
        if (offset >= 0) {
          *reinterpret_cast<Held<T, 8>*>(y + offset) = packed;
          if constexpr (STATISTICS) {
            const auto element = [&](int e) { return to_float(packed[e]); };
            if (statistics.count == 0) statistics.begin(element);
            statistics.push(element);
          }
        }
        f.advance(at, f.output_step);
      }
    }
    pipelines.halos.consumer_release(iteration - 1);
  }
  if constexpr (STATISTICS) {
    const int64_t part = (blockIdx.x / f.across * CONSUMERS + group) * (WARPGROUP / 32) + warp;
    statistics.template store<8, 16>([&](int e) { return partial + part * f.filters + first + eight * 8 + e; });
  }
}

template <typename T, int CHANNELS, bool STATISTICS>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    weight_stationary_conv(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y,
                                 typename Statistics<T>::State* partial, WeightStationaryConv<CHANNELS> f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ WeightStationaryPipelines pipelines;
  char* halos = reinterpret_cast<char*>(shared);
  char* kept = halos + STATIONARY_HALOS * f.HALO_BYTES;
  if (threadIdx.x == 0) pipelines.start();
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    if constexpr (STATISTICS) setmaxnreg_dec<f.PRODUCER_REGISTERS>();
    produce_halos(x, halos, pipelines.halos, f);
  } else {
    if constexpr (STATISTICS) setmaxnreg_inc<f.CONSUMER_REGISTERS_REDUCING>();
    keep_weights(weight, kept, f);
    fence_proxy_async();
    pipelines.kept.arrive();
    pipelines.kept.wait(0);
    consume_tiles<T, CHANNELS, STATISTICS>(kept, halos, y, partial, pipelines, f);
  }
}

// A block keeps the weights of its filters: it takes every `across`-th tile. `blocks` for each 64 filters; 0: one for
// each multiprocessor.
template <typename T, int CHANNELS, bool STATISTICS>
void run_weight_stationary(
    const MbcCall& call, const HaloArguments& a, int64_t blocks, typename Statistics<T>::State* partial) {
  const WeightStationaryConv<CHANNELS> f(a);
  const int64_t tiles_of_pixels = f.tiles / f.across, most = multiprocessors() / f.across;
  if (blocks == 0) blocks = max(int64_t{1}, min(tiles_of_pixels, most));
  const int shared = STATIONARY_HALOS * f.HALO_BYTES + f.taps * f.ALL * f.KEPT_PITCH;
  MBC_LAUNCH_SHARED((weight_stationary_conv<T, CHANNELS, STATISTICS>), static_cast<unsigned>(blocks * f.across),
                    PIPELINE_THREADS, shared, call.stream, in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), partial, f);
}

template <typename T, bool STATISTICS>
const char* run_weight_stationary(
    const MbcCall& call, const HaloArguments& a, int64_t blocks, typename Statistics<T>::State* partial) {
  if (const char* problem = unaligned(call)) return problem;
  if (HaloConv(a).halo_pixels() > MOST_HALO_PIXELS) return "a halo is larger than shared memory";
  if (a.channels == 64)
    run_weight_stationary<T, 64, STATISTICS>(call, a, blocks, partial);
  else if (a.channels == 128)
    run_weight_stationary<T, 128, STATISTICS>(call, a, blocks, partial);
  else
    return "there are neither 64 nor 128 channels";
  return nullptr;
}

}  // namespace mbc

// Data gradients, too, with transposed and rotated weights (`backward`).
extern "C" const char* mbc_weight_stationary_conv(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) {
    const auto& a = arguments<HaloArguments>(call);
    if (const char* problem = run_weight_stationary<decltype(of), false>(call, a, 0, nullptr)) return problem;
    return launched();
  });
}
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_weight_stationary_conv_statistics(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<HaloStatisticsArguments>(call);
    auto* partial = out<typename Statistics<T>::State>(call, 5);
    if (const char* problem = run_weight_stationary<T, true>(call, a, a.blocks, partial)) return problem;
    merge_all_parts(call.stream, a.blocks * CONSUMERS * (WARPGROUP / 32), a.filters, partial,
                    EpilogueStatistics<T>{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}});
    return launched();
  });
}
