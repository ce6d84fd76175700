// Emulated fp32 on tensor cores: three fp16 products for one fp32 product (3xFP16). A word, scaled by a power of two
// into the range of fp16, is the sum of two fp16 numbers, high (rounded) and low (the rest): 22 bits of significand. Of
// the four products of two words, low * low is dropped, 2^-22 of the whole. fp16 has as many bits as tf32 and is twice
// as fast.
//
// Tensor cores truncate their accumulators instead of rounding them. Therefore only K = 64 is accumulated there, then
// scaled back and added in fp32 registers. The truncation is biased towards zero, and the bias adds up over the layers
// of a network: the scale compensates the average loss (TRUNCATION_COMPENSATION).
#pragma once

#include <cfloat>

#include "conv_operands.cuh"
#include "pipeline.cuh"
#include "fp32_emulated_conv_arguments.h"

namespace mbc {

constexpr int EMULATED_K = 64, EMULATED_K_STEPS = EMULATED_K / 16;  // K that tensor cores accumulate; wgmma steps

// An accumulator that is truncated after each K = 16 of high * high loses half an ulp, on average 0.36 * 2^-23 of its
// value; for partial sums of 1/4, 2/4, 3/4 and 1 that is 0.9 * 2^-23 of the result. The small products are added before
// these, when truncation loses almost nothing.
constexpr float TRUNCATION_COMPENSATION = 1.0f + FLT_EPSILON;

struct SplitPair {
  uint32_t high, low;  // each of two words
};

__device__ inline SplitPair split_pair(float a, float b) {
  const float words[2] = {a, b};
  const uint32_t high = rounded_word<__half>(words);
  const float left[2] = {a - to_float(element_of<__half>(high, 0)), b - to_float(element_of<__half>(high, 1))};
  return {high, rounded_word<__half>(left)};
}

// Powers of two: the largest that scales words up to `largest` below 2^15, and its inverse. Infinities and NaN keep
// their values.
struct SplitScale {
  float up, down;

  __device__ explicit SplitScale(float largest) {
    uint32_t bits;
    memcpy(&bits, &largest, sizeof(bits));
    const int32_t exponent = min(max(268 - static_cast<int32_t>(bits >> 23), 1), 253);
    const uint32_t both[2] = {static_cast<uint32_t>(exponent) << 23, static_cast<uint32_t>(254 - exponent) << 23};
    memcpy(&up, &both[0], sizeof(up));
    memcpy(&down, &both[1], sizeof(down));
  }
};

// The larger magnitude of finite words: an infinite word stays infinite under any scale, and must not set the scale of
// others.
__device__ inline float larger_finite(float largest, float word) {
  const float size = fabsf(word);
  return size <= FLT_MAX ? max(largest, size) : largest;
}

// The maximum of `value`, which is not negative, over a warp.
__device__ inline float largest_of_warp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

// The maximum over `threads` threads of the block; `of_warps` has a word for each warp.
__device__ inline float largest_of_block(float value, float* of_warps, int threads) {
  value = largest_of_warp(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < threads / 32; ++warp) value = max(value, of_warps[warp]);
  return value;
}

// A pipeline stage, K = 64: 128 rows (A) in fp32, which consumers split, and N columns (B), which were split earlier.
constexpr int EMULATED_M = 64 * CONSUMERS;  // rows
constexpr int EMULATED_ROW = EMULATED_K * 4;       // bytes of a row

template <int N>
struct EmulatedStage {
  static constexpr int WEIGHTS = N * SWIZZLE_ROW;            // bytes of either half of the columns
  static constexpr int COPIED = 2 * WEIGHTS + 16;            // bytes of the columns and their scale
  static constexpr int IMAGE = 2 * WEIGHTS + SWIZZLE_ATOM;  // offset of the rows
  static constexpr int BYTES = IMAGE + EMULATED_M * EMULATED_ROW;
  static constexpr int COUNT = N == 128 ? 3 : 4;
};

// Offset of the `sixteen`-th 16 bytes of a row, swizzled so that two neighbouring rows, which are read together, have
// no bank conflicts.
__device__ inline int32_t image_offset(int32_t row, int32_t sixteen) {
  return row * EMULATED_ROW + ((sixteen ^ row % 2 * 4) * 16);
}

constexpr int PREPARE_THREADS = 256;

// Run by a block of PREPARE_THREADS: splits the columns of a stage into the layout that wgmma reads,
// `EmulatedStage::COPIED` bytes. `largest`: the magnitude of the words that the thread wrote to `tile`. K is permuted
// to the order of a consumer thread (`FetchedRows`), which reads four neighbours together.
template <int N>
__device__ inline void split_operand(const float (&tile)[N][EMULATED_K + 1], float largest, char* to) {
  __shared__ float of_warps[PREPARE_THREADS / 32];
  const SplitScale scale(largest_of_block(largest, of_warps, PREPARE_THREADS));  // its barrier completes `tile`
  using Stage = EmulatedStage<N>;
  for (int32_t i = threadIdx.x; i < N * 8; i += PREPARE_THREADS) {
    const int32_t n = i / 8, sixteen = i % 8;
    uint32_t high[4], low[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* two = tile[n] + sixteen / 2 * 16 + 4 * t + sixteen % 2 * 2;
      const SplitPair split = split_pair(two[0] * scale.up, two[1] * scale.up);
      high[t] = split.high;
      low[t] = split.low;
    }
    *reinterpret_cast<uint4*>(to + swizzled_offset(n, sixteen)) = {high[0], high[1], high[2], high[3]};
    *reinterpret_cast<uint4*>(to + Stage::WEIGHTS + swizzled_offset(n, sixteen)) = {low[0], low[1], low[2], low[3]};
  }
  if (threadIdx.x < 4) reinterpret_cast<float*>(to + 2 * Stage::WEIGHTS)[threadIdx.x] = scale.down;
}

// K = 64 of 16 rows of each warp. Thread (g, t) = (lane / 4, lane % 4) has, of rows g (h = 0) and g + 8 (h = 1), the
// words (2t, 2t + 1, 2t + 8, 2t + 9) of each K = 16.
struct FetchedRows {
  Vec<float, 4> words[EMULATED_K_STEPS][2];

  template <typename Fetch>
  __device__ void load(Fetch fetch) {
#pragma unroll
    for (int step = 0; step < EMULATED_K_STEPS; ++step)
#pragma unroll
      for (int h = 0; h < 2; ++h) words[step][h] = fetch(step, h);
  }
};

// K = 64 of 16 rows, split, as A fragments of wgmma.
struct SplitRows {
  uint32_t high[EMULATED_K_STEPS][4], low[EMULATED_K_STEPS][4];
  float down[2];  // inverse scales of the two rows

  __device__ void split(const FetchedRows& rows) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int step = 0; step < EMULATED_K_STEPS; ++step) {
        const float* v = rows.words[step][h].v;
        largest[h] = max(largest[h], max(max(fabsf(v[0]), fabsf(v[1])), max(fabsf(v[2]), fabsf(v[3]))));
      }
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
      for (int h = 0; h < 2; ++h) largest[h] = max(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], mask));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const SplitScale scale(largest[h]);
      down[h] = scale.down;
#pragma unroll
      for (int step = 0; step < EMULATED_K_STEPS; ++step)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const float* two = rows.words[step][h].v + 2 * pair;
          const SplitPair split = split_pair(two[0] * scale.up, two[1] * scale.up);
          high[step][h + 2 * pair] = split.high;
          low[step][h + 2 * pair] = split.low;
        }
    }
  }
};

// Issues wgmma for K = 64: all low * high and high * low, then high * high, so that fewer truncations have the size of
// the whole sum. `wgmma_wait` waits for them.
template <bool MN_MAJOR, int TILES>
__device__ inline void start_3xfp16(
    float (&part)[TILES][4], const SplitRows& rows, const char* high, const char* low) {
  constexpr int STEP = MN_MAJOR ? 16 * SWIZZLE_ROW : 16 * 2;  // bytes of K = 16
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < EMULATED_K_STEPS; ++step) {
    wgmma_rs<MN_MAJOR, __half>(part, rows.low[step], high + step * STEP, step > 0);
    wgmma_rs<MN_MAJOR, __half>(part, rows.high[step], low + step * STEP, true);
  }
#pragma unroll
  for (int step = 0; step < EMULATED_K_STEPS; ++step)
    wgmma_rs<MN_MAJOR, __half>(part, rows.high[step], high + step * STEP, true);
  wgmma_commit();
}

// A consumer's main loop over `count` stages: `fetch(iteration, step, half)` reads rows (A), `operand(iteration)` is
// the address of B's high words, the low words are `low_at` bytes after, `down(iteration)` is the inverse scale of B.
// `after(iteration)` may use the accumulators and clear them. With more than two stages, words of the next stage are
// fetched before wgmma is issued, because a warp whose A is in registers stalls until the tensor cores have read it.
template <bool MN_MAJOR, int TILES, int STAGES, typename Fetch, typename Operand, typename Down, typename After>
__device__ inline void consume_stages_3xfp16(
    float (&sums)[TILES][4], int32_t count, Pipeline<STAGES>& pipeline, Fetch fetch, Operand operand, int low_at,
    Down down, After after) {
  constexpr bool AHEAD = STAGES > 2;
  FetchedRows next;
  SplitRows rows;
  float part[TILES][4];
  const auto load = [&](int32_t iteration) {
    pipeline.consumer_wait(iteration);
    fence_proxy_async();
    next.load([&](int step, int h) { return fetch(iteration, step, h); });
  };
  if (count == 0) return;
  load(0);
  for (int32_t iteration = 0; iteration < count; ++iteration) {
    rows.split(next);
    const float of_operand = down(iteration) * TRUNCATION_COMPENSATION;
    const float both[2] = {rows.down[0] * of_operand, rows.down[1] * of_operand};
    if (AHEAD && iteration + 1 < count) load(iteration + 1);
    const char* high = operand(iteration);
    start_3xfp16<MN_MAJOR>(part, rows, high, high + low_at);
    wgmma_wait(part);
    pipeline.consumer_release(iteration);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[j][v] += part[j][v] * both[v / 2];
    after(iteration);
    if (!AHEAD && iteration + 1 < count) load(iteration + 1);
  }
}

}  // namespace mbc
