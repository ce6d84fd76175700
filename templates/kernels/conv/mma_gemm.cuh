// The main loop of convolutions by mma.sync, as implicit GEMMs: M = output pixels, N = filters, K = filter taps times
// channels. Channels last, bf16 or fp16 with sums in fp32.
//
// Tile       128 pixels x 128 or 64 filters (FILTERS), 128 threads. A warp computes a quarter, 64 x 64 or 64 x 32, by mma.sync
//            m16n8k16: it reads 8 or 6 KiB of shared memory for 64 or 32 products.
// Pipeline   three or four stages of K = 32, copied by cp.async, all but one ahead, those of the next tile included. A stage
//            has 32 channels of one filter tap; channels beyond the last, and pixels outside the image, are zeros. Operands
//            of the next K = 16 are in registers while those of this one are multiplied. Copies have no branch, so that their
//            instructions run between products.
// Banks      16-byte chunks are swizzled, so that the eight rows of an 8 x 8 matrix are in different banks for cp.async
//            and ldmatrix.
// Shared     49,152 bytes: two blocks fit into the 100 KiB of a multiprocessor of compute capability 8.6, 8.9 and 12.0.
// Registers  at most 255 or 168, so that two or three blocks are resident: 128 or 64 sums, and twice 32 or 24 of operands.
// Results    stay in registers: a thread has eight neighbouring filters of a pixel, so that a quad stores 64 bytes.
#pragma once

#include "mma.cuh"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/mma_gemm.py.
constexpr int MMA_PIXELS = 128, MMA_CHANNELS = 32;
constexpr int MMA_WARPS_ACROSS = 2, MMA_WARPS_DOWN = 2, MMA_THREADS = 32 * MMA_WARPS_ACROSS * MMA_WARPS_DOWN;
constexpr int MMA_WARP_PIXELS = MMA_PIXELS / MMA_WARPS_DOWN, MMA_ROWS = MMA_WARP_PIXELS / 8;  // MMA_ROWS: pixels of a thread

// BLOCKS: that are resident on a multiprocessor.
template <int FILTERS_, int STAGES_, int BLOCKS_>
struct MmaTile {
  static constexpr int FILTERS = FILTERS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int WARP_FILTERS = FILTERS / MMA_WARPS_ACROSS, GROUPS = WARP_FILTERS / 32;
  static constexpr int A_BYTES = MMA_PIXELS * MMA_CHANNELS * 2, STAGE_BYTES = A_BYTES + FILTERS * MMA_CHANNELS * 2;
  static constexpr int STAGES_BYTES = STAGES * STAGE_BYTES, RESULT_BYTES = MMA_PIXELS * FILTERS * 2;
  // A warp's sums: of the m-th 16 pixels and n-th eight filters, as in mma_m16n8k16.
  using Sums = float[MMA_WARP_PIXELS / 16][WARP_FILTERS / 8][4];
};

// Offset of 16 bytes of a row whose K = 32 are 64 bytes: two rows share the 128 bytes of all banks. EXCHANGED rows of a
// matrix that is read together are 2 i and 2 i + 1 of four groups of eight, others are neighbours.
template <bool EXCHANGED = false>
__device__ inline int32_t k_row_offset(int32_t row, int32_t sixteen) {
  return row / 2 * 128 + (row % 2 * 4 + (sixteen ^ (EXCHANGED ? row / 8 : row / 2) % 4)) * 16;
}

// Offset of eight columns of a row of K that has so many BYTES.
template <int BYTES>
__device__ inline int32_t wide_row_offset(int32_t row, int32_t eight) { return row * BYTES + (eight ^ row % 8) * 16; }

// Copies eight elements to a stage, or zeros, without reading `from`, if they are not `there`.
template <typename T>
__device__ inline void copy_eight(char* to, const T* from, int32_t element, bool there) {
  cp_async_16(reinterpret_cast<uint4*>(to), from + element, there);
}

// A filter tap and the first channel of a stage; equal for all threads.
struct KPosition {
  int32_t channel = 0, tap = 0, z = 0, y = 0, x = 0;
  int32_t offset = 0;  // elements from the first channel under the first tap to this channel under this tap
};

// What a thread keeps of a pixel whose channels it copies: the element under the first tap, which may be outside the image,
// and bits of which all those that a tap `needs` are set if it is inside.
struct MmaPixel {
  int32_t first;
  uint32_t inside;
  __device__ bool reaches(uint32_t needed) const { return (inside & needed) == needed; }
};

// Pixels of a 1x1 convolution: one tap.
struct PointPixels {
  int32_t pixels, channels;

  __host__ __device__ int32_t taps() const { return 1; }
  __device__ MmaPixel locate(int32_t pixel) const { return {pixel * channels, pixel < pixels ? 1u : 0u}; }
  __device__ uint32_t needs(const KPosition&) const { return 1; }
  __device__ void advance(KPosition& k) const {
    k.channel += MMA_CHANNELS;
    k.offset += MMA_CHANNELS;
  }
};

// [pixels, K] by weights. Forward, weights are [filters, taps, channels]. BACKWARD: a data gradient at a stride of one,
// whose `channels` are those of the gradient that is read: weights are [channels, taps, filters], the taps reversed.
template <typename T, typename Pixels, bool BACKWARD_>
struct MmaGemm {
  static constexpr bool BACKWARD = BACKWARD_;
  const T *image, *weights;
  Pixels pixels;
  int32_t channels, filters;

  __device__ int32_t stages() const { return (channels + MMA_CHANNELS - 1) / MMA_CHANNELS * pixels.taps(); }
};

// The share of a thread in the copies of tiles of the same filters: 16 bytes of some pixels, and of some rows of weights,
// in each stage.
template <typename Tile, typename G>
struct MmaCopies {
  static constexpr int ROWS = MMA_THREADS / 4, PIXELS = MMA_PIXELS / ROWS, WEIGHTS = Tile::FILTERS / ROWS;
  static constexpr int EIGHTS = Tile::FILTERS / 8, K_ROWS = MMA_THREADS / EIGHTS;  // BACKWARD: rows of weights are K
  static_assert(ROWS % 32 == 0 && (K_ROWS % 8 == 0 || !G::BACKWARD));  // the swizzle of a thread's rows is equal

  const G& gemm;
  int32_t channel, to, to_weights;  // first of eight channels; offsets of the first copies in a stage
  int32_t weight[WEIGHTS];          // element of the first K
  // Number of filters (or columns of weights) from the first one that this thread copies to the last filter of the
  // convolution. A tile may reach beyond the last filter. There the thread writes zeros and reads no weights, because all
  // blocks would read, and wait for, the same line of the L2 cache.
  int32_t filters_left;
  MmaPixel pixel[PIXELS];           // from `channel` on

  __device__ MmaCopies(const G& gemm_, int32_t first_filter) : gemm(gemm_) {
    const int32_t thread = threadIdx.x, row = thread / 4, n = thread % EIGHTS, taps = gemm.pixels.taps();
    channel = thread % 4 * 8;
    filters_left = gemm.filters - first_filter - (G::BACKWARD ? n * 8 : row);
    to = k_row_offset(row, thread % 4);
    to_weights = Tile::A_BYTES + (G::BACKWARD ? wide_row_offset<EIGHTS * 16>(k_row(), n) : k_row_offset<true>(row, thread % 4));
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i)
      weight[i] = G::BACKWARD
                      ? ((k_row() + i * K_ROWS) * taps + taps - 1) * gemm.filters + min(first_filter + n * 8, gemm.filters - 8)
                      : min(first_filter + row + i * ROWS, gemm.filters - 1) * taps * gemm.channels + channel;
  }
  __device__ static int32_t k_row() { return static_cast<int32_t>(threadIdx.x) / EIGHTS; }
  __device__ void locate(int32_t first_pixel) {
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      pixel[i] = gemm.pixels.locate(first_pixel + static_cast<int32_t>(threadIdx.x) / 4 + i * ROWS);
      pixel[i].first += channel;
    }
  }
  // Without a branch, so that the compiler may put it between products.
  __device__ void start(char* stage, const KPosition& k, bool there) const {
    const bool inside = there && k.channel + channel < gemm.channels;
    const uint32_t needed = gemm.pixels.needs(k);
    const int32_t first_weight = G::BACKWARD ? (k.channel * gemm.pixels.taps() - k.tap) * gemm.filters : k.tap * gemm.channels + k.channel;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
      copy_eight(stage + to + i * ROWS * MMA_CHANNELS * 2, gemm.image, pixel[i].first + k.offset, inside && pixel[i].reaches(needed));
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      if constexpr (G::BACKWARD)
        copy_eight(stage + to_weights + i * K_ROWS * EIGHTS * 16, gemm.weights, weight[i] + first_weight,
                   there && filters_left > 0 && k.channel + k_row() + i * K_ROWS < gemm.channels);
      else
        copy_eight(stage + to_weights + i * ROWS * MMA_CHANNELS * 2, gemm.weights, weight[i] + first_weight, inside && i * ROWS < filters_left);
    }
  }
};

// Where a thread's rows of 8 x 8 matrices are in a stage, from which ldmatrix reads fragments of m16n8k16. Forward, the
// j-th and next column of the n-th eight are filters 4 j + 2 n and 4 j + 2 n + 1 (j = 0, 2, 4, 6) of 32, so that a thread's
// sums are those of eight neighbouring filters.
template <typename T, typename Tile, bool BACKWARD>
struct MmaFragments {
  static constexpr int STEPS = MMA_CHANNELS / 16, K_ROW = Tile::FILTERS * 2;  // K_ROW: bytes of a row of weights, BACKWARD
  static constexpr int WEIGHTS = BACKWARD ? Tile::GROUPS * 2 : STEPS;
  // Offsets: of pixels, of each 16 channels; of weights, of each 16 channels or, BACKWARD, of each 16 filters. Further
  // rows are multiples of 1,024 bytes, or of 16 rows of K, ahead: the swizzle is the same there.
  int32_t a[STEPS], b[WEIGHTS];

  __device__ MmaFragments(int32_t warp_pixel, int32_t warp_filter) {
    const int32_t lane = threadIdx.x % 32, half = lane / 16;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) a[i] = warp_pixel * MMA_CHANNELS * 2 + k_row_offset(lane % 16, i * 2 + half);
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      if constexpr (BACKWARD)
        b[i] = Tile::A_BYTES + wide_row_offset<K_ROW>(lane % 16, warp_filter / 8 + i * 2 + half);
      else
        b[i] = Tile::A_BYTES + warp_filter * MMA_CHANNELS * 2 + k_row_offset<true>(lane % 8 / 2 * 8 + half * 2 + lane % 2, i * 2 + lane / 8 % 2);
    }
  }
  // Operands of K = 16.
  struct Step {
    uint32_t pixels[MMA_WARP_PIXELS / 16][4], weights[Tile::GROUPS * 2][4];
  };
  __device__ void load(Step& to, const char* stage, int step) const {
    const auto at = [&](int32_t offset) { return reinterpret_cast<const uint4*>(stage + offset); };
#pragma unroll
    for (int n = 0; n < Tile::GROUPS * 2; ++n)
      if constexpr (BACKWARD)
        ldmatrix_x4_trans(to.weights[n], at(b[n] + step * 16 * K_ROW));
      else
        ldmatrix_x4(to.weights[n], at(b[step] + n / 2 * 2048 + n % 2 * 256));
#pragma unroll
    for (int m = 0; m < MMA_WARP_PIXELS / 16; ++m) ldmatrix_x4(to.pixels[m], at(a[step] + m * 1024));
  }
  __device__ static void multiply(typename Tile::Sums& sums, const Step& step) {
#pragma unroll
    for (int m = 0; m < MMA_WARP_PIXELS / 16; ++m)
#pragma unroll
      for (int n = 0; n < Tile::GROUPS * 4; ++n)
        mma_m16n8k16<T>(sums[m][n], step.pixels[m], step.weights[n / 2][n % 2 * 2], step.weights[n / 2][n % 2 * 2 + 1]);
  }
};

// Exchanges words among the four threads of a quad: the n-th word of thread t becomes the t-th of thread n.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool upper = (threadIdx.x & mask) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = words[mask == 1 ? 2 * i : i], &high = words[(mask == 1 ? 2 * i : i) + mask];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, mask);
      low = upper ? received : low;
      high = upper ? high : received;
    }
  }
}

// Copies to one stage after another: `start(stage)` starts those to a stage, `advance()` goes on to the next one.
template <typename Start, typename Advance>
struct MmaAhead {
  Start start;
  Advance advance;
};
template <typename Start, typename Advance>
MmaAhead(Start, Advance) -> MmaAhead<Start, Advance>;

// A ring of stages in shared memory.
template <int STAGES, int STAGE_BYTES>
struct MmaStages {
  char* stages;
  int32_t to = 0, from = 0;  // the stages that are copied and multiplied next

  __device__ static void advance(int32_t& stage) { stage = stage == STAGES - 1 ? 0 : stage + 1; }
  template <typename Ahead>
  __device__ void start(const Ahead& ahead) {
    ahead.start(stages + to * STAGE_BYTES);
    cp_async_commit();
    advance(to);
  }
  template <typename Ahead>
  __device__ void start_first(const Ahead& ahead) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      start(ahead);
      ahead.advance();
    }
  }
  // Multiplies `count` stages, at least one, and starts copies to as many: STAGES - 1 were started before. Operands of the
  // next K = 16 are read from shared memory while those of this one are multiplied.
  template <typename Fragments, typename Sums, typename Ahead>
  __device__ void multiply(int32_t count, const Fragments& fragments, Sums& sums, const Ahead& ahead) {
    typename Fragments::Step first, second;
    const auto load = [&](typename Fragments::Step& step, int number) { fragments.load(step, stages + from * STAGE_BYTES, number); };
    const auto arrive = [&] {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      load(first, 0);
    };
    arrive();
    while (true) {
      load(second, 1);
      start(ahead);
      fragments.multiply(sums, first);
      ahead.advance();
      advance(from);
      if (--count == 0) break;
      arrive();
      fragments.multiply(sums, second);
    }
    fragments.multiply(sums, second);
  }
};

}  // namespace mbc
