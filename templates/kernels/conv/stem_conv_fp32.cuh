// fp32 operands of stem convolutions: MMAs in tf32, by rounded words or by three MMAs for one product (3xTF32), and the
// band of the image in fp32.
#pragma once

#include <cfloat>

#include "stem_conv.cuh"

namespace mbc {

// Splits `word`: truncates it to tf32 and returns the rest. Of the four partial products, rest * rest is dropped, which
// is 2^-22 of the product in the mean ("3xTF32", NVIDIA CUTLASS, example 27). Truncation takes two instructions where
// rounding takes five; its mean error is compensated (`add_tiles`). The rest of an infinite word is NaN, even where the
// element of K is padding: values that are not finite stay so, as in Winograd's algorithm.
__device__ inline float split_off_tf32(float& word) {
  const float whole = word;
  word = truncate_to_tf32(whole);
  return whole - word;
}

// Calls `run(plane, row, word, at)` for a thread's vectors of the band: the position of the first word in the image,
// which may be outside, and its address in shared memory.
template <typename Run>
__device__ inline void each_vector_of_band(const StemConv& f, const StemTile& tile, float* image, Run run) {
  const int32_t vectors = f.pitch / 4, rows = blockDim.x / vectors, left = blockDim.x - rows * vectors;
  const int32_t from = (tile.x0 * f.stride_width - f.pad_left) * f.channels - f.lead;
  const int32_t first = tile.y0 * f.stride_height - f.pad_top;
  int32_t row = threadIdx.x / vectors, v = threadIdx.x - row * vectors;
  while (row < f.kernel_depth * f.band_rows) {
    const int32_t z = row / f.band_rows;
    run(tile.z0 + z, first + row - z * f.band_rows, from + 4 * v, image + row * f.pitch + 4 * v);
    row += rows;
    v += left;
    if (v >= vectors) {
      v -= vectors;
      ++row;
    }
  }
}

// Starts copies of the image rows under the output rows of a tile, zeros in the padding; complete after
// `cp_async_wait<0>`.
__device__ inline void fetch_band_of_words(const float* x, float* image, const StemConv& f, const StemTile& tile) {
  const int32_t width = f.width * f.channels;
  each_vector_of_band(f, tile, image, [&](int32_t plane, int32_t row, int32_t word, float* to) {
    const bool inside = plane >= 0 && plane < f.depth && row >= 0 && row < f.height;
    const float* line = x + (inside ? (int64_t{tile.image} * f.depth + plane) * f.height + row : 0) * width;
    if (f.wide_image) {
      const bool there = inside && word >= 0 && word < width;
      cp_async_16(reinterpret_cast<uint4*>(to), line + (there ? word : 0), there);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = inside && word + e >= 0 && word + e < width ? line[word + e] : 0.0f;
    }
  });
  cp_async_commit();
}
__device__ inline void round_band(float* image, const StemConv& f, const StemTile& tile) {
  each_vector_of_band(f, tile, image, [](int32_t, int32_t, int32_t, float* at) {
    round_to_tf32(reinterpret_cast<uint4*>(at));
  });
}

// MMAs of 2 x TILES tiles of 16 rows x 8 columns, K = 8. SPLIT: three mma.sync for one product, small products first;
// otherwise all words are in tf32.
template <bool SPLIT, int TILES>
__device__ inline void mma_tiles(float (&sums)[2][TILES][4], float (&a)[2][4], float (&b)[TILES][2]) {
  if constexpr (SPLIT) {
    float small_a[2][4], small_b[TILES][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int w = 0; w < 4; ++w) small_a[m][w] = split_off_tf32(a[m][w]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) small_b[j][w] = split_off_tf32(b[j][w]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int m = 0; m < 2; ++m) mma_m16n8k8_tf32(sums[m][j], small_a[m], b[j][0], b[j][1]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int m = 0; m < 2; ++m) mma_m16n8k8_tf32(sums[m][j], a[m], small_b[j][0], small_b[j][1]);
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int m = 0; m < 2; ++m) mma_m16n8k8_tf32(sums[m][j], a[m], b[j][0], b[j][1]);
}

constexpr int SHORT_SUM = 4;  // K = 8 steps that are accumulated on tensor cores
// On average, truncated rests lose 1.2 * 2^-23 of a product, the dropped product of both rests 1 * 2^-23, and truncated
// accumulators 2 * 2^-23: most of that is compensated.
constexpr float TRUNCATION_COMPENSATION = 1.0f + 3.0f * FLT_EPSILON;

// Adds accumulators of short sums in fp32: tensor cores truncate their accumulators instead of rounding them.
template <int TILES>
__device__ inline void add_tiles(float (&sums)[2][TILES][4], float (&part)[2][TILES][4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        sums[m][j][v] += part[m][j][v] * TRUNCATION_COMPENSATION;
        part[m][j][v] = 0.0f;
      }
}

}  // namespace mbc
