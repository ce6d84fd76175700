// Top-k accuracy: the share of positions whose target is among the k largest logits.
//
// Bytes      logits and target in, once: how many logits come before the target's is counted, nothing is sorted.
// Threads    256: a warp a position where classes are adjacent, else a thread a position.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth, and latency for few positions.
#include "cross_entropy.cuh"

struct TopKArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t classes;
  int64_t inner;
  int64_t k;
  int64_t parts;
};

namespace mbc {

template <typename T, bool ADJACENT>
__global__ void top_k(const T* logits, const int32_t* target, Score* partial, float* share, int64_t positions,
                      int64_t classes, int64_t inner, int64_t k) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x % LANES);
  Score score{0.0, 0.0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t t = target[p];
    if (t < 0 || t >= classes) continue;
    const T* row = logits + start_of<ADJACENT>(p, classes, inner);
    const int64_t stride = ADJACENT ? 1 : inner;
    const float own = to_float(row[t * stride]);
    int before = 0;  // of equals the first comes first, and NaN before all
    for (int64_t c = lane; c < classes; c += LANES) {
      const float v = to_float(row[c * stride]);
      if (!(v <= own) || (v == own && c < t)) ++before;
    }
#pragma unroll
    for (int s = LANES / 2; s > 0; s /= 2) before += __shfl_xor_sync(0xffffffffu, before, s);
    if (lane == 0 && before < k && own == own) score.loss += 1.0;
  }
  store_score(score, partial, share, nullptr, static_cast<double>(positions));
}

}  // namespace mbc

extern "C" const char* mbc_top_k(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<TopKArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const auto* target = in<int32_t>(call, 1);
  float* share = out<float>(call, 2);
  Score* partial = a.parts > 1 ? out<Score>(call, 3) : nullptr;
  const unsigned parts = static_cast<unsigned>(a.parts);
  MBC_FOR_TYPE(a.type, T, {
    if (a.layout == MBC_CHANNELS_LAST || a.inner == 1)
      MBC_LAUNCH((top_k<T, true>), parts, dim3(32, 8), call.stream, in<T>(call, 0), target, partial, share, positions,
                 a.classes, a.inner, a.k);
    else
      MBC_LAUNCH((top_k<T, false>), parts, dim3(1, THREADS), call.stream, in<T>(call, 0), target, partial, share,
                 positions, a.classes, a.inner, a.k);
  });
  merge(partial, a.parts, share, nullptr, positions, call.stream);
  return launched();
}
