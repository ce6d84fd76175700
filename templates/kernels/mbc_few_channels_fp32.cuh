// Products of fp32 words on tensor cores, which read tf32: one, of words that were rounded to it before, or three.
#pragma once

#include "mbc_few_channels.cuh"

namespace mbc {

// What tf32 leaves of a word, which then is what it holds. Of a product's four parts the one of what both words leave
// is dropped: it is 2^-22 of the product, in the mean ("3xTF32", NVIDIA CUTLASS, example 27). Cutting off takes two
// instructions where rounding takes five, for an error of 4e-7 instead of 1.5e-7. An infinite word leaves NaN, and so
// may one under a term that a sum has only for its length: what is not finite stays so, as in Winograd's algorithm.
__device__ inline float take_small(float& word) {
  const float whole = word;
  word = cut_to_tf32(whole);
  return whole - word;
}

// Two tiles of 16 rows times as many of 8 columns as there are. SPLIT: in three products, small ones first; otherwise
// all words are in tf32.
template <bool SPLIT, int TILES>
__device__ inline void multiply_tiles(float (&sums)[2][TILES][4], float (&a)[2][4], float (&b)[TILES][2]) {
  if constexpr (SPLIT) {
    float small_a[2][4], small_b[TILES][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int w = 0; w < 4; ++w) small_a[m][w] = take_small(a[m][w]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) small_b[j][w] = take_small(b[j][w]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add_tf32(sums[m][j], small_a[m], b[j][0], b[j][1]);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add_tf32(sums[m][j], a[m], small_b[j][0], small_b[j][1]);
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int m = 0; m < 2; ++m) multiply_add_tf32(sums[m][j], a[m], b[j][0], b[j][1]);
}

// Tensor cores cut off what a sum has beyond fp32 instead of rounding it: long sums are put together of short ones.
template <int TILES>
__device__ inline void add_tiles(float (&sums)[2][TILES][4], float (&part)[2][TILES][4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        sums[m][j][v] += part[m][j][v];
        part[m][j][v] = 0.0f;
      }
}

}  // namespace mbc
