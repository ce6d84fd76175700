// Stem convolution of volumes (stem_volume.cuh), forward, alone and with the statistics of its result in the epilogue, of the
// batch or of each sample.
//
// GEMM       M = output voxels, N = filters, K = elements under a filter: nine lines of 3 * channels elements, each padded
//            only to whole words.
// Tile       16 lines x 32 columns x 32 or 16 filters, one output plane after another. A warp has two lines, each twice 16
//            voxels.
// Warps      8, all equal: they read the plane after the next one, run mma.sync m16n8k16, and store.
// Shared     four planes of the image, 12,096 bytes for one channel and 39,744 for four; weights as fragments, a table of
//            the words under a filter, and masks of padding.
// Registers  80 for three blocks on a multiprocessor; with statistics 128 for two.
// Limit      the bytes of the output, with statistics perhaps instructions: decision 098.
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for W = 8 or 4 filters from W t on:
//
//   A (voxels)      k = 2t, 2t+1   2t+8, 2t+9          D            filters W t + 2j   W t + 2j + 1
//     column g        a[0]           a[2]                column g        d[j][0]          d[j][1]
//     column g + 8    a[1]           a[3]                column g + 8    d[j][2]          d[j][3]
#include "batch_norm.cuh"
#include "stem_volume.cuh"
#include "stem_volume_operands.h"
#include "thread_statistics.cuh"

namespace mbc {

// The part of shared memory that stays as it is. A step of K = 16 has eight words.
template <typename T, int CHANNELS, int TILES>
struct StemTables {
  using Planes = StemPlanes<T, CHANNELS, 1>;
  static constexpr int RUN = Planes::RUN, PADDED = RUN + RUN % 2, LINES = SWEEP_TAPS * SWEEP_TAPS, ELEMENTS = LINES * PADDED;
  static constexpr int STEPS = (ELEMENTS + 15) / 16;
  uint4 weights[STEPS][TILES / 2][32];  // of two tiles of eight filters, as fragments
  StemWords<Planes, STEPS * 8> words;
  uint32_t masks[STEPS * 8];

  __device__ void fill(const T* filters) {
    // Element e of word k of a filter, or zero in the padding.
    const auto weight = [&](int32_t filter, int32_t k, int e) {
      const int32_t line = 2 * k / PADDED, at = 2 * k % PADDED + e;
      return line < LINES && at < RUN ? filters[(filter * LINES + line) * RUN + at] : from_float<T>(0.0f);
    };
    uint32_t* const fragments = reinterpret_cast<uint32_t*>(weights);
    for (int32_t i = threadIdx.x; i < STEPS * TILES * 64; i += STEM_THREADS) {
      const int32_t half = i % 2, lane = i / 4 % 32, tile = i / 128 % (TILES / 2) * 2 + i / 2 % 2, step = i / 64 / TILES;
      const int32_t filter = lane / 8 * 2 * TILES + 2 * tile + lane / 4 % 2, k = step * 8 + half * 4 + lane % 4;
      fragments[i] = hold_each<T, 2>([&](int e) { return weight(filter, k, e); }).words[0];
    }
    for (int32_t k = threadIdx.x; k < STEPS * 8; k += STEM_THREADS)
      masks[k] = 2 * k >= ELEMENTS ? 0 : 2 * k % PADDED + 1 < RUN ? 0xffffffffu : 0xffffu;
    words.fill(PADDED, 2);
  }
};

// Where statistics go: states of `samples`, each reduced by itself. Those of a filter are numbered by tile of the
// sample, then by warp.
template <typename T>
struct StemStates {
  typename Statistics<T>::State* partial;
  int64_t samples, tiles_of_sample;

  int64_t parts() const { return tiles_of_sample * STEM_WARPS; }
  __device__ typename Statistics<T>::State* at(int64_t tile, int64_t filters) const {
    const int64_t part = tile % tiles_of_sample * STEM_WARPS + threadIdx.x / 32;
    return partial + (part * samples + tile / tiles_of_sample) * filters;
  }
};

template <typename T, int CHANNELS, int TILES, bool REDUCES>
__global__ void __launch_bounds__(STEM_THREADS, REDUCES ? 2 : 3)
    stem_volume(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, StemStates<T> states, StemVolume f) {
  using Tables = StemTables<T, CHANNELS, TILES>;
  using Planes = typename Tables::Planes;
  constexpr int W = 2 * TILES;  // filters of a thread
  MBC_DYNAMIC_SHARED(shared);
  Tables& tables = *reinterpret_cast<Tables*>(shared);
  uint32_t* const words = reinterpret_cast<uint32_t*>(&tables + 1);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int32_t first = static_cast<int32_t>(blockIdx.y) * TILES * 8, warp_line = static_cast<int32_t>(threadIdx.x) / 32 * STEM_LINES;
  const SweepTile tile = f.tile(blockIdx.x);
  Planes planes(x, words, f, tile);
  tables.fill(weight + first * (Tables::LINES * Tables::RUN));
  planes.begin();

  const int32_t line = tile.line + warp_line, column = tile.column + g;
  const int32_t lines = f.out_lines - line, columns = f.out_columns - column;  // from the thread's first voxel on
  const uint32_t* const voxel = words + warp_line * Planes::PITCH + g * CHANNELS;
  T* to = y + (tile.row * f.out_planes + tile.begin) * f.plane_elements() + line * f.line_elements() + column * f.filters + first + t * W;
  ThreadStatistics<T, W> statistics;
  for (int32_t plane = 0; plane < tile.end - tile.begin; ++plane, to += f.plane_elements()) {
    __syncthreads();  // the planes under this one have arrived, and those under the one before have been read
    const bool more = tile.begin + plane + 1 < tile.end;
#pragma unroll 1
    for (int32_t row = 0; row < STEM_LINES; ++row) {
      if (more) planes.fetch(plane + SWEEP_TAPS, row);
      __syncwarp();  // or the compiler would keep the tables in registers
      float sums[STEM_PIECES][TILES][4] = {};
#pragma unroll
      for (int step = 0; step < Tables::STEPS; ++step) {
        uint32_t a[STEM_PIECES][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int word = step * 8 + half * 4;
          if (2 * word >= Tables::ELEMENTS) continue;
          const uint32_t mask = tables.masks[word + t];
          const uint32_t* const from = voxel + row * Planes::PITCH + tables.words.of(plane)[word + t];
#pragma unroll
          for (int v = 0; v < 2 * STEM_PIECES; ++v) a[v / 2][2 * half + v % 2] = from[v * 8 * CHANNELS] & mask;
        }
#pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) {
          const uint4 b = tables.weights[step][pair][lane];
#pragma unroll
          for (int piece = 0; piece < STEM_PIECES; ++piece) {
            mma_m16n8k16<T>(sums[piece][2 * pair], a[piece], b.x, b.y);
            mma_m16n8k16<T>(sums[piece][2 * pair + 1], a[piece], b.z, b.w);
          }
        }
      }
      if (more) planes.keep(plane + SWEEP_TAPS, row);
      if (row >= lines) continue;
#pragma unroll
      for (int v = 0; v < 2 * STEM_PIECES; ++v) {
        if (v * 8 >= columns) continue;
        Held<T, W> result;
#pragma unroll
        for (int j = 0; j < TILES; ++j) result.words[j] = rounded_word<T>(sums[v / 2][j] + v % 2 * 2);
        *reinterpret_cast<Held<T, W>*>(to + row * f.line_elements() + v * 8 * f.filters) = result;
        if constexpr (REDUCES) {
          const auto element = [&](int e) { return to_float(result[e]); };
          if (v == 0 && statistics.count == 0) statistics.begin(element);  // a thread without the first voxel has none
          statistics.push(element);
        }
      }
    }
  }
  if constexpr (REDUCES)
    statistics.template store<4, 16>([&](int e) { return states.at(blockIdx.x, f.filters) + first + t * W + e; });
}

template <bool REDUCES, typename T>
const char* run_stem_volume(const MbcCall& call, T* y, const StemVolume& f, const StemStates<T>& states) {
  if (const char* problem = unaligned(call)) return problem;
  return with_stem_channels(f.channels, [&](auto channels) -> const char* {
    const auto run = [&](auto tiles) {
      constexpr int CHANNELS = decltype(channels)::value, TILES = decltype(tiles)::value;
      using Tables = StemTables<T, CHANNELS, TILES>;
      const dim3 grid(static_cast<unsigned>(f.tiles), static_cast<unsigned>(f.filters / (8 * TILES)));
      constexpr int BYTES = sizeof(Tables) + Tables::Planes::WORDS * 4;
      MBC_LAUNCH_SHARED((stem_volume<T, CHANNELS, TILES, REDUCES>), grid, STEM_THREADS, BYTES, call.stream, in<T>(call, 0),
                        in<T>(call, 1), y, states, f);
      return launched();
    };
    return f.filters % 32 == 0 ? run(std::integral_constant<int, 4>()) : run(std::integral_constant<int, 2>());
  });
}

}  // namespace mbc

extern "C" const char* mbc_stem_volume(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) {
    using T = decltype(of);
    return run_stem_volume<false>(call, out<T>(call, 2), StemVolume(arguments<StemVolumeArguments>(call)), StemStates<T>{});
  });
}
extern "C" const char* mbc_stem_volume_statistics(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<StemVolumeArguments>(call);
    const auto at = operands_of_stem_volume_statistics(call);
    const StemVolume f(a);
    const StemStates<T> states{at.workspace.as<typename Statistics<T>::State>(), a.samples, f.tiles / a.samples};
    if (const char* problem = run_stem_volume<true>(call, at.y.as<T>(), f, states)) return problem;
    return merge_statistics<T>(call, states, a.samples * a.filters, at.mean, at.variance);
  });
}
