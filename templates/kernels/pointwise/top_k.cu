// Top-k accuracy: the share of positions whose target is among the k largest logits, over all positions or over those
// that count.
//
// Bytes      logits and target in, once: the kernel counts the logits before the target's; it sorts nothing.
// Threads    256: a warp for each position if classes are adjacent, else a thread for each position.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth, and latency for few positions.
#include "cross_entropy.cuh"
#include "top_k_arguments.h"

namespace mbc {

// `share` nullptr: the divisor of the sums is on the device, and another kernel divides.
template <typename T, bool ADJACENT>
__global__ void top_k(const T* logits, const int32_t* target, Score* partial, float* share, int64_t positions,
                      int64_t classes, int64_t inner, int64_t k, bool ignores, int64_t ignored) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x % LANES);
  Score score{0.0, 0.0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t t = target[p];
    if (t < 0 || t >= classes || (ignores && t == ignored)) continue;
    const T* row = logits + start_of<ADJACENT>(p, classes, inner);
    const int64_t stride = ADJACENT ? 1 : inner;
    const float own = to_float(row[t * stride]);
    int before = 0;  // among equals the first; NaN before all
    for (int64_t c = lane; c < classes; c += LANES) {
      const float v = to_float(row[c * stride]);
      if (!(v <= own) || (v == own && c < t)) ++before;
    }
#pragma unroll
    for (int s = LANES / 2; s > 0; s /= 2) before += __shfl_xor_sync(0xffffffffu, before, s);
    if (lane == 0 && before < k && own == own) score.loss += 1.0;
  }
  if (share != nullptr) return store_score(score, partial, share, nullptr, static_cast<double>(positions));
  score = sum_block(score);
  if (threadIdx.x == 0 && threadIdx.y == 0) partial[blockIdx.x] = score;
}

template <typename T>
void run_top_k(const MbcCall& call, Score* partial, float* share) {
  const auto& a = arguments<TopKArguments>(call);
  const T* logits = in<T>(call, 0);
  const auto* target = in<int32_t>(call, 1);
  const unsigned parts = static_cast<unsigned>(a.parts);
  const int64_t positions = a.rows * a.inner;
  for_adjacency(a, [&](auto adjacent, dim3 block) {
    MBC_LAUNCH((top_k<T, adjacent>), parts, block, call.stream, logits, target, partial, share, positions, a.channels,
               a.inner, a.k, a.ignores != 0, a.ignored);
  });
}

}  // namespace mbc

extern "C" const char* mbc_top_k(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<TopKArguments>(call);
  float* share = out<float>(call, 2);
  Score* partial = a.parts > 1 ? out<Score>(call, 3) : nullptr;
  MBC_FOR_TYPE(a.type, T, { run_top_k<T>(call, partial, share); });
  merge(partial, a.parts, share, nullptr, a.rows * a.inner, call.stream);
  return launched();
}

extern "C" const char* mbc_top_k_mean(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<TopKArguments>(call);
  Score* partial = out<Score>(call, 4);
  MBC_FOR_TYPE(a.type, T, { run_top_k<T>(call, partial, nullptr); });
  const Mean mean{in<float>(call, 2), call.reals[0], static_cast<double>(a.rows * a.inner)};
  MBC_LAUNCH(add_target_scores, 1, THREADS, call.stream, partial, a.parts, out<float>(call, 3),
             static_cast<float*>(nullptr), mean);
  return launched();
}
