// The main loop of convolutions by mma.sync, as implicit GEMMs: M = output pixels, N = filters, K = filter taps times
// channels. Channels last, bf16 or fp16 with sums in fp32.
//
// Tile       128 pixels x 128 or 64 filters (FILTERS), 256 threads. A warp computes 64 x 32 of it, or 32 x 32, by mma.sync
//            m16n8k16.
// Pipeline   three stages of K = 32, copied by cp.async two stages ahead: 8,192 bytes of pixels, and of weights 8,192 or
//            4,096. A stage has 32 channels of one filter tap; channels beyond the last, and pixels outside the image, are
//            zeros.
// Banks      16-byte chunks are swizzled, so that the eight rows of an 8 x 8 matrix are in different banks for cp.async
//            and ldmatrix.
// Shared     three stages, which the rounded results of the tile reuse: 49,152 or 36,864 bytes. Two blocks fit into the
//            100 KiB of a multiprocessor of compute capability 8.6, 8.9 and 12.0.
#pragma once

#include "mma.cuh"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/mma_gemm.py.
constexpr int MMA_PIXELS = 128, MMA_CHANNELS = 32, MMA_STAGES = 3;
constexpr int MMA_THREADS = 256, MMA_WARPS = MMA_THREADS / 32;

template <int FILTERS_>
struct MmaTile {
  static constexpr int FILTERS = FILTERS_, WARPS_ACROSS = FILTERS / 32;
  static constexpr int WARP_PIXELS = MMA_PIXELS * WARPS_ACROSS / MMA_WARPS;
  static constexpr int A_BYTES = MMA_PIXELS * MMA_CHANNELS * 2, STAGE_BYTES = A_BYTES + FILTERS * MMA_CHANNELS * 2;
  static constexpr int RESULT_BYTES = MMA_PIXELS * FILTERS * 2, STAGES_BYTES = MMA_STAGES * STAGE_BYTES;
  static_assert(STAGES_BYTES >= RESULT_BYTES);
  // A warp's sums: of the m-th 16 pixels and n-th eight filters, as in mma_m16n8k16.
  using Sums = float[WARP_PIXELS / 16][4][4];

  static constexpr int RESULT_ROW = FILTERS * 2;  // bytes
  // Offset of eight filters of a pixel's results.
  __device__ static int32_t result_offset(int32_t row, int32_t eight) { return row * RESULT_ROW + (eight ^ row % 8) * 16; }
};

// Offset of 16 bytes of a row whose K = 32 are 64 bytes: two rows share the 128 bytes of all banks.
__device__ inline int32_t k_row_offset(int32_t row, int32_t sixteen) {
  return row / 2 * 128 + (row % 2 * 4 + (sixteen ^ row / 2 % 4)) * 16;
}

// Copies eight elements to a stage, or zeros if they are not `there`.
template <typename T>
__device__ inline void copy_eight(char* to, const T* from, int32_t element, bool there) {
  cp_async_16(reinterpret_cast<uint4*>(to), from + (there ? element : 0), there);
}

// A filter tap and the first channel of a stage; equal for all threads.
struct KPosition {
  int32_t channel = 0, tap = 0, z = 0, y = 0, x = 0;
  int32_t offset = 0;  // elements from the first channel under the first tap to this channel under this tap
};

// Pixels of a 1x1 convolution: one tap. `locate` returns what a thread keeps of a pixel whose channels it copies.
struct PointPixels {
  struct Pixel {
    int32_t first;  // element of the image
    bool there;
    __device__ bool reaches(const KPosition&) const { return there; }
  };
  int32_t pixels, channels;

  __host__ __device__ int32_t taps() const { return 1; }
  __device__ Pixel locate(int32_t pixel) const { return {pixel * channels, pixel < pixels}; }
  __device__ void advance(KPosition& k) const {
    k.channel += MMA_CHANNELS;
    k.offset += MMA_CHANNELS;
  }
};

// [pixels, K] by weights. Forward, weights are [filters, taps, channels]. BACKWARD: a data gradient at a stride of one,
// whose `channels` are those of the gradient that is read: weights are [channels, taps, filters], the taps reversed.
template <typename T, typename Pixels, bool BACKWARD_>
struct MmaGemm {
  using Pixel = typename Pixels::Pixel;
  static constexpr bool BACKWARD = BACKWARD_;
  const T *image, *weights;
  Pixels pixels;
  int32_t channels, filters;

  __device__ int32_t stages() const { return (channels + MMA_CHANNELS - 1) / MMA_CHANNELS * pixels.taps(); }
};

// The share of a thread in the copies of a tile: 16 bytes of two pixels, and of one or two rows of weights, in each stage.
template <typename Tile, typename G>
struct MmaCopies {
  static constexpr int ROWS = MMA_THREADS / 4, PIXELS = MMA_PIXELS / ROWS, WEIGHTS = Tile::FILTERS / ROWS;
  static constexpr int EIGHTS = Tile::FILTERS / 8, K_ROWS = MMA_THREADS / EIGHTS;  // BACKWARD: rows of weights are K

  const G& gemm;
  int32_t channel, to, to_weights;   // first of eight channels, or row of K; offsets of the first copies in a stage
  int32_t weight[WEIGHTS];           // element of the first K
  bool there[WEIGHTS];
  typename G::Pixel pixel[PIXELS];
  int32_t k_row = static_cast<int32_t>(threadIdx.x) / EIGHTS;

  __device__ MmaCopies(const G& gemm_, int32_t first_pixel, int32_t first_filter) : gemm(gemm_) {
    const int32_t thread = threadIdx.x, row = thread / 4, n = thread % EIGHTS, taps = gemm.pixels.taps();
    channel = thread % 4 * 8;
    to = k_row_offset(row, thread % 4);
    to_weights = Tile::A_BYTES + (G::BACKWARD ? (k_row * EIGHTS + (n ^ k_row % 8)) * 16 : to);
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) pixel[i] = gemm.pixels.locate(first_pixel + row + i * ROWS);
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      const int32_t filter = first_filter + (G::BACKWARD ? n * 8 : row + i * ROWS);
      there[i] = filter < gemm.filters;
      weight[i] = G::BACKWARD ? ((k_row + i * K_ROWS) * taps + taps - 1) * gemm.filters + filter
                              : filter * taps * gemm.channels + channel;
    }
  }
  __device__ void start(char* stage, const KPosition& k) const {
    const bool inside = k.channel + channel < gemm.channels;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
      copy_eight(stage + to + i * ROWS * MMA_CHANNELS * 2, gemm.image, pixel[i].first + k.offset + channel,
           inside && pixel[i].reaches(k));
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      if constexpr (G::BACKWARD)
        copy_eight(stage + to_weights + i * K_ROWS * EIGHTS * 16, gemm.weights,
             weight[i] + (k.channel * gemm.pixels.taps() - k.tap) * gemm.filters,
             there[i] && k.channel + k_row + i * K_ROWS < gemm.channels);
      else
        copy_eight(stage + to_weights + i * ROWS * MMA_CHANNELS * 2, gemm.weights, weight[i] + k.tap * gemm.channels + k.channel,
             there[i] && inside);
    }
  }
};

// Where a thread's rows of 8 x 8 matrices are in a stage, from which ldmatrix reads fragments of m16n8k16.
template <typename T, typename Tile, bool BACKWARD>
struct MmaFragments {
  static constexpr int STEPS = MMA_CHANNELS / 16, K_ROW = Tile::FILTERS * 2;  // K_ROW: bytes of a row of weights, BACKWARD
  // Offsets: of pixels, of each 16 channels; of weights, of each 16 channels or, BACKWARD, of each 16 filters. Further
  // rows are multiples of 1,024 bytes, or of 16 rows of K, ahead: the swizzle is the same there.
  int32_t a[STEPS], b[2];

  __device__ MmaFragments(int32_t warp_pixel, int32_t warp_filter) {
    const int32_t lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = warp_pixel * MMA_CHANNELS * 2 + k_row_offset(row, i * 2 + half);
      if constexpr (BACKWARD)
        b[i] = Tile::A_BYTES + row * K_ROW + (warp_filter / 8 + (i * 2 + half ^ lane % 4) ^ lane % 8 / 4 * 4) * 16;
      else
        b[i] = Tile::A_BYTES + warp_filter * MMA_CHANNELS * 2 + k_row_offset(half * 8 + lane % 8, i * 2 + lane / 8 % 2);
    }
  }
  // Multiplies the K = 32 of a stage.
  __device__ void multiply(typename Tile::Sums& sums, const char* stage) const {
    const auto at = [&](int32_t offset) { return reinterpret_cast<const uint4*>(stage + offset); };
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t weights[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if constexpr (BACKWARD)
          ldmatrix_x4_trans(weights[n], at(b[n] + step * 16 * K_ROW));
        else
          ldmatrix_x4(weights[n], at(b[step] + n * 1024));
#pragma unroll
      for (int m = 0; m < Tile::WARP_PIXELS / 16; ++m) {
        uint32_t pixels[4];
        ldmatrix_x4(pixels, at(a[step] + m * 1024));
#pragma unroll
        for (int n = 0; n < 4; ++n)
          mma_m16n8k16<T>(sums[m][n], pixels, weights[n / 2][n % 2 * 2], weights[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
};

// Runs `multiply` on each of `count` stages, and `copy` on stages ahead of them, whether or not they are `there`. A call of
// `multiply` calls its second argument once, which starts the next copy. Begins and ends with a barrier.
template <int STAGE_BYTES, typename Copy, typename Multiply>
__device__ inline void multiply_stages(int32_t count, char* stages, const Copy& copy, const Multiply& multiply) {
  int32_t to = 0, from = 0;  // stages
  const auto next = [](int32_t& stage) { stage = stage == MMA_STAGES - 1 ? 0 : stage + 1; };
  const auto start = [&](int32_t i) {
    copy(stages + to * STAGE_BYTES, i < count);
    cp_async_commit();
    next(to);
  };
  __syncthreads();  // the stages are free
#pragma unroll
  for (int i = 0; i < MMA_STAGES - 1; ++i) start(i);
  for (int32_t i = 0; i < count; ++i) {
    cp_async_wait<MMA_STAGES - 2>();
    __syncthreads();
    multiply(stages + from * STAGE_BYTES, [&] { start(i + MMA_STAGES - 1); });
    next(from);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Computes a tile, and writes its results, rounded, to `results`, which may be the stages. Begins and ends with a barrier.
template <typename Tile, typename T, typename Pixels, bool BACKWARD>
__device__ inline void multiply_tile(const MmaGemm<T, Pixels, BACKWARD>& gemm, int32_t first_pixel, int32_t first_filter,
                                     char* stages, char* results) {
  const MmaCopies<Tile, MmaGemm<T, Pixels, BACKWARD>> copies(gemm, first_pixel, first_filter);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int32_t warp_pixel = warp / Tile::WARPS_ACROSS * Tile::WARP_PIXELS, warp_filter = warp % Tile::WARPS_ACROSS * 32;
  const MmaFragments<T, Tile, BACKWARD> fragments(warp_pixel, warp_filter);
  typename Tile::Sums sums = {};
  KPosition k;
  const auto copy = [&](char* stage, bool there) {
    if (there) copies.start(stage, k);
    gemm.pixels.advance(k);
  };
  const auto multiply = [&](const char* stage, const auto& start_next) {
    start_next();
    fragments.multiply(sums, stage);
  };
  multiply_stages<Tile::STAGE_BYTES>(gemm.stages(), stages, copy, multiply);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    // Rows that are multiples of eight apart have the same swizzle.
    char* const row = results + Tile::result_offset(warp_pixel + lane / 4, warp_filter / 8 + n) + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < Tile::WARP_PIXELS / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<uint32_t*>(row + (m * 2 + half) * 8 * Tile::RESULT_ROW) = rounded_word<T>(sums[m][n] + half * 2);
  }
  __syncthreads();
}

}  // namespace mbc
