// The softmax of a position of logits [rows, classes, inner], by a warp or by a thread.
#pragma once

#include "loss.cuh"

namespace mbc {

// LANES threads share a position whose classes are `stride` apart.
template <int LANES, typename T>
__device__ inline Softmax softmax(const T* logits, int64_t classes, int64_t stride, int lane) {
  Softmax s{-INFINITY, INT64_MAX, 0.0f, 0.0f};
  for (int64_t c = lane; c < classes; c += LANES) {
    const float v = to_float(logits[c * stride]);
    if (v > s.greatest) s.greatest = v, s.best = c;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    const float v = __shfl_xor_sync(0xffffffffu, s.greatest, step);
    const long long best = __shfl_xor_sync(0xffffffffu, static_cast<long long>(s.best), step);
    if (v > s.greatest || (v == s.greatest && best < s.best)) s.greatest = v, s.best = best;
  }
  for (int64_t c = lane; c < classes; c += LANES) {
    const float v = to_float(logits[c * stride]) - s.greatest;
    if (c != s.best) s.others += expf(v);
    s.sum += v;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    s.others += __shfl_xor_sync(0xffffffffu, s.others, step);
    s.sum += __shfl_xor_sync(0xffffffffu, s.sum, step);
  }
  return s;
}

// Calls `run` with whether the classes of a position are adjacent, as a constant, and the threads of a block: then a warp
// takes a position, otherwise a thread.
template <typename Arguments, typename Run>
void for_adjacency(const Arguments& a, Run run) {
  if (a.layout == MBC_CHANNELS_LAST || a.inner == 1)
    run(std::true_type(), dim3(32, 8));
  else
    run(std::false_type(), dim3(1, THREADS));
}

// Position p (a row and a pixel of it) of logits [rows, classes, inner]: where its classes start.
template <bool ADJACENT>
__device__ inline int64_t start_of(int64_t p, int64_t classes, int64_t inner) {
  return ADJACENT ? p * classes : p / inner * classes * inner + p % inner;
}

}  // namespace mbc
