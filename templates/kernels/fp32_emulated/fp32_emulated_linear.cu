// Fully connected layers in emulated fp32 (3xFP16, see fp32_emulated.cuh): y = x w^T, dx = dy w, dw = dy^T x.
//
// GEMM       forward   M = outputs, N = samples, K = inputs       (weights are A, read and split once)
//            data      M = inputs,  N = samples, K = outputs      (weights are A)
//            filter    M = outputs, N = inputs,  K = samples
// Tile       128 rows x 128 columns, or x 64 if there are at most 64 columns; a stage is K = 64. With fewer tiles than
//            multiprocessors K is divided into `parts` (split-K), which `add_parts` adds in order, in fp64. Blocks are
//            persistent.
// Warps      384 threads. Warpgroup 0 is the producer: fp32 rows with cp.async, and columns, which `prepare_columns`
//            split earlier, with one cp.async.bulk for each stage. Warpgroups 1 and 2 are consumers of 64 rows each:
//            they split rows in registers (A) and start wgmma m64nNk16 with columns in shared memory (B).
// Shared     3 stages of 66,560 bytes at N = 128, 4 of 50,176 at N = 64.
// Registers  80 for a producer thread, 208 for a consumer thread (setmaxnreg).
// Limit      with small mini-batches the bytes of the weights, read (or their gradient written) once.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of its 64 rows:
//
//              columns   8j + 2t   8j + 2t + 1      j = 0 .. N/8 - 1
//   row 16w + g          d[j][0]     d[j][1]
//   row 16w + g + 8      d[j][2]     d[j][3]
#include "fp32_emulated.cuh"
#include "split_k.cuh"
#include "fp32_emulated_linear_arguments.h"

namespace mbc {

enum class Pass { FORWARD, DATA, FILTER };

// A: a line in memory has all K of one row, or (MN_MAJOR) all rows of one K.
template <Pass PASS>
struct Lines {
  static constexpr bool MN_MAJOR = PASS != Pass::FORWARD;
  static constexpr int WORDS = MN_MAJOR ? EMULATED_M : EMULATED_K;  // words of a stage
  static constexpr int COUNT = EMULATED_M * EMULATED_K / WORDS;

  // Offset of the `sixteen`-th 16 bytes of a line, swizzled to avoid bank conflicts.
  __device__ static int32_t offset(int32_t line, int32_t sixteen) {
    return MN_MAJOR ? line * WORDS * 4 + ((sixteen ^ line / 4 % 4 * 2) * 16) : image_offset(line, sixteen);
  }
  // The four words of K = 16 that thread t of a row's four threads has (`FetchedRows`).
  __device__ static Vec<float, 4> fetch(const char* lines, int32_t row, int step, int t) {
    if (!MN_MAJOR) return load<4>(reinterpret_cast<const float*>(lines + image_offset(row, 4 * step + t)));
    const float* words = reinterpret_cast<const float*>(lines) + (16 * step + 4 * t) * WORDS + (row ^ 8 * t);
    return {{words[0], words[WORDS], words[2 * WORDS], words[3 * WORDS]}};
  }
};

struct EmulatedGemm {
  int32_t rows, columns, depth;
  int32_t stages, parts;         // stages and parts of K
  int32_t across, tiles, units;  // tiles of columns, of both, and times parts
  bool accumulate;

  EmulatedGemm(const Fp32EmulatedLinearArguments& a, int n)
      : rows(static_cast<int32_t>(a.rows)), columns(static_cast<int32_t>(a.columns)),
        depth(static_cast<int32_t>(a.depth)), stages(static_cast<int32_t>(divide_up(depth, EMULATED_K))),
        parts(static_cast<int32_t>(a.parts)), across(static_cast<int32_t>(divide_up(columns, n))),
        tiles(static_cast<int32_t>(divide_up(rows, EMULATED_M)) * across),
        units(tiles * parts), accumulate(a.accumulate != 0 && parts == 1) {}
  // The first stage of a part of K.
  __device__ int32_t begin(int32_t part) const { return stages * part / parts; }
};

// A tile of the result over a part of K.
struct Unit {
  int32_t row, across, part;  // the first row; the tile of columns
  int32_t begin, end;         // stages

  __device__ Unit(const EmulatedGemm& f, int32_t number)
      : row(number % f.tiles / f.across * EMULATED_M), across(number % f.tiles % f.across), part(number / f.tiles),
        begin(f.begin(part)), end(f.begin(part + 1)) {}
};

// Splits columns into the layout that wgmma reads: a block of `EmulatedStage::COPIED` bytes for every stage of N
// columns.
template <int N, Pass PASS>
__global__ void prepare_columns(const float* __restrict__ words, char* prepared, EmulatedGemm f) {
  __shared__ float tile[N][EMULATED_K + 1];
  constexpr bool MN_MAJOR = PASS == Pass::FILTER;
  float largest = 0.0f;
  for (int32_t i = threadIdx.x; i < N * EMULATED_K; i += PREPARE_THREADS) {
    const int32_t n = MN_MAJOR ? i % N : i / EMULATED_K, k = MN_MAJOR ? i / N : i % EMULATED_K;
    const int32_t column = blockIdx.y * N + n, depth_index = blockIdx.x * EMULATED_K + k;
    const int64_t at = MN_MAJOR ? static_cast<int64_t>(depth_index) * f.columns + column
                               : static_cast<int64_t>(column) * f.depth + depth_index;
    tile[n][k] = column < f.columns && depth_index < f.depth ? words[at] : 0.0f;
    largest = larger_finite(largest, tile[n][k]);
  }
  const int64_t stage = static_cast<int64_t>(blockIdx.y) * f.stages + blockIdx.x;
  split_operand<N>(tile, largest, prepared + stage * EmulatedStage<N>::COPIED);
}

template <int N, Pass PASS>
__device__ inline void produce_units(const float* __restrict__ rows, const char* __restrict__ prepared, char* stages,
                                  Pipeline<EmulatedStage<N>::COUNT>& pipeline, const EmulatedGemm& f) {
  using Stage = EmulatedStage<N>;
  using L = Lines<PASS>;
  constexpr int SIXTEENS = L::WORDS / 4, LINE_STRIDE = WARPGROUP / SIXTEENS;
  const int32_t sixteen = threadIdx.x % SIXTEENS, mine = threadIdx.x / SIXTEENS;
  const int32_t lines = L::MN_MAJOR ? f.depth : f.rows, words = L::MN_MAJOR ? f.rows : f.depth;
  int32_t iteration = 0;
  for (int32_t number = blockIdx.x; number < f.units; number += gridDim.x) {
    const Unit unit(f, number);
    const char* columns = prepared + static_cast<int64_t>(unit.across) * f.stages * Stage::COPIED;
    for (int32_t s = unit.begin; s < unit.end; ++s, ++iteration) {
      char* stage = stages + iteration % Stage::COUNT * Stage::BYTES;
      pipeline.producer_acquire(iteration);
      Barrier& full = pipeline.full[iteration % Stage::COUNT];
      if (threadIdx.x == 0)
        full.bulk_copy_arrive(stage, columns + static_cast<int64_t>(s) * Stage::COPIED, Stage::COPIED);
      const int32_t line = (L::MN_MAJOR ? s * EMULATED_K : unit.row) + mine;
      const int32_t word = (L::MN_MAJOR ? unit.row : s * EMULATED_K) + sixteen * 4;
      const int32_t left_over = word < words ? lines - line : 0;  // lines that exist
      const float* from = rows + static_cast<int64_t>(line) * words + word;
#pragma unroll
      for (int i = 0; i < L::COUNT; i += LINE_STRIDE) {
        const bool there = i < left_over;
        cp_async_16(reinterpret_cast<uint4*>(stage + Stage::IMAGE + L::offset(mine + i, sixteen)),
                      there ? from : rows, there);
        from += static_cast<int64_t>(LINE_STRIDE) * words;
      }
      full.cp_async_arrive();
    }
  }
}

template <int N, Pass PASS>
__device__ inline void consume_units(const char* stages, float* __restrict__ output,
                                      Pipeline<EmulatedStage<N>::COUNT>& pipeline, const EmulatedGemm& f) {
  using Stage = EmulatedStage<N>;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int32_t first = (threadIdx.x / 32 - WARPGROUP / 32) * 16 + lane / 4;  // row
  const auto stage = [&](int32_t iteration) { return stages + iteration % Stage::COUNT * Stage::BYTES; };
  const auto fetch = [&](int32_t iteration, int step, int h) {
    return Lines<PASS>::fetch(stage(iteration) + Stage::IMAGE, first + 8 * h, step, t);
  };
  const auto down = [&](int32_t iteration) {
    return *reinterpret_cast<const float*>(stage(iteration) + 2 * Stage::WEIGHTS);
  };
  const auto stages_of = [&](int32_t number) {
    const Unit unit(f, number);
    return unit.end - unit.begin;
  };
  float sums[N / 8][4] = {};
  int32_t number = blockIdx.x, left = number < f.units ? stages_of(number) : 0;
  const auto write = [&](int32_t) {
    if (--left > 0) return;
    const Unit unit(f, number);
    float* tile = output + static_cast<int64_t>(unit.part) * f.rows * f.columns;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = unit.row + first + 8 * h, from = row < f.rows ? unit.across * N + 2 * t : f.columns;
      if constexpr (PASS == Pass::FILTER) {
        float* to = tile + static_cast<int64_t>(row) * f.columns + from;
        Vec<float, 2> before[N / 8] = {};
        if (f.accumulate)
#pragma unroll
          for (int j = 0; j < N / 8; ++j)
            if (from + 8 * j < f.columns) before[j] = load<2>(to + 8 * j);
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
          if (from + 8 * j < f.columns)
            store(to + 8 * j,
                  Vec<float, 2>{{before[j].v[0] + sums[j][2 * h], before[j].v[1] + sums[j][2 * h + 1]}});
      } else {
        float* to = tile + static_cast<int64_t>(from) * f.rows + row;
#pragma unroll
        for (int j = 0; j < N / 8; ++j, to += static_cast<int64_t>(8) * f.rows)
#pragma unroll
          for (int v = 0; v < 2; ++v)
            if (from + 8 * j + v < f.columns) to[v * f.rows] = sums[j][2 * h + v];
      }
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[j][v] = 0.0f;
    number += gridDim.x;
    left = number < f.units ? stages_of(number) : 0;
  };
  int32_t iterations = 0;
  for (int32_t mine = number; mine < f.units; mine += gridDim.x) iterations += stages_of(mine);
  consume_stages_3xfp16<false>(sums, iterations, pipeline, fetch, stage, Stage::WEIGHTS, down, write);
}

template <int N, Pass PASS>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    fp32_emulated_gemm(const float* __restrict__ rows, const char* __restrict__ prepared, float* __restrict__ output,
                      EmulatedGemm f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<EmulatedStage<N>::COUNT> pipeline;
  char* stages = aligned_shared(shared);
  if (threadIdx.x == 0) pipeline.start(WARPGROUP + 1);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce_units<N, PASS>(rows, prepared, stages, pipeline, f);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume_units<N, PASS>(stages, output, pipeline, f);
  }
}

template <int N, Pass PASS>
void run_fp32_emulated_gemm(const MbcCall& call, const Fp32EmulatedLinearArguments& a) {
  const EmulatedGemm f(a, N);
  char* prepared = out<char>(call, 3);
  const int64_t elements = a.rows * a.columns, stages = static_cast<int64_t>(f.across) * f.stages;
  float* behind = reinterpret_cast<float*>(prepared + stages * EmulatedStage<N>::COPIED);
  float* output = a.parts > 1 ? behind : out<float>(call, 2);
  const dim3 each(static_cast<unsigned>(f.stages), static_cast<unsigned>(f.across));
  MBC_LAUNCH((prepare_columns<N, PASS>), each, PREPARE_THREADS, call.stream, in<float>(call, 0), prepared, f);
  const unsigned blocks = static_cast<unsigned>(f.units < multiprocessors() ? f.units : multiprocessors());
  constexpr int SHARED = EmulatedStage<N>::COUNT * EmulatedStage<N>::BYTES + 1008;
  MBC_LAUNCH_SHARED((fp32_emulated_gemm<N, PASS>), blocks, PIPELINE_THREADS, SHARED, call.stream, in<float>(call, 1),
                    prepared, output, f);
  if (a.parts > 1) add_parts(call.stream, output, out<float>(call, 2), elements, a.parts, a.accumulate != 0);
}

template <Pass PASS>
const char* run_fp32_emulated_linear(const MbcCall& call) {
  const auto& a = arguments<Fp32EmulatedLinearArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  if (a.columns > 64)
    run_fp32_emulated_gemm<128, PASS>(call, a);
  else
    run_fp32_emulated_gemm<64, PASS>(call, a);
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_fp32_emulated_linear(const MbcCall& call) {
  return mbc::run_fp32_emulated_linear<mbc::Pass::FORWARD>(call);
}
extern "C" const char* mbc_fp32_emulated_linear_backward_data(const MbcCall& call) {
  return mbc::run_fp32_emulated_linear<mbc::Pass::DATA>(call);
}
extern "C" const char* mbc_fp32_emulated_linear_backward_filter(const MbcCall& call) {
  return mbc::run_fp32_emulated_linear<mbc::Pass::FILTER>(call);
}
