// Common parts of fp32_emulated_halo.cu and fp32_emulated_halo_filter.cu, which split a halo once for all filter taps:
// two warpgroups split, two others are consumers.
#pragma once

#include "fp32_emulated.cuh"

namespace mbc {

constexpr int SPLITTERS = 2 * WARPGROUP, HALO_THREADS = SPLITTERS + CONSUMERS * WARPGROUP;

// High and low fp16 words of eight fp32 words, scaled.
__device__ inline void split_eight(const Vec<float, 4> (&words)[2], float up, uint4& high, uint4& low) {
  uint32_t both[2][4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float* two = words[pair / 2].v + pair % 2 * 2;
    const SplitPair split = split_pair(two[0] * up, two[1] * up);
    both[0][pair] = split.high;
    both[1][pair] = split.low;
  }
  high = {both[0][0], both[0][1], both[0][2], both[0][3]};
  low = {both[1][0], both[1][1], both[1][2], both[1][3]};
}

}  // namespace mbc
