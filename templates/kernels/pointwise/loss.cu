// Softmax cross entropy, its gradient, and the weighted sum of several losses.
//
// Bytes      loss: logits in. Gradient: logits in, the gradient out. Both read logits for the maximum, the sum and the gradient, from the second time on from the cache.
// Threads    256: a warp for each position if classes are adjacent, else a thread.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth, and latency for few positions: see cross_entropy_rows.cu and cross_entropy_pixels.cu.
#include "mbc_control.h"
#include "cross_entropy.cuh"
#include "loss_arguments.h"
#include "loss_operands.h"

namespace mbc {

// ADJACENT: the classes of a position are adjacent, and a warp takes them; otherwise a thread takes them, and
// neighbouring threads read neighbouring positions.
template <typename T, bool ADJACENT>
__global__ void cross_entropy(const T* logits, const int32_t* target, Score* partial, float* loss, float* correct,
                              int64_t positions, int64_t classes, int64_t inner, float smoothing) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x);
  Score score{0.0, 0.0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const T* row = logits + start_of<ADJACENT>(p, classes, inner);
    const int64_t stride = ADJACENT ? 1 : inner;
    const Softmax s = softmax<LANES>(row, classes, stride, lane);
    if (lane != 0) continue;
    const int64_t t = target[p];
    if (t < 0 || t >= classes) {
      score.loss += NAN;  // `guard` then skips this step
      continue;
    }
    score.loss += s.loss(to_float(row[t * stride]), classes, smoothing);
    if (s.best == t) score.correct += 1.0;
  }
  store_score(score, partial, loss, correct, static_cast<double>(positions));
}

template <typename T, bool ADJACENT>
__global__ void cross_entropy_backward(const T* logits, const int32_t* target, const MbcControl* control, T* dlogits,
                                       int64_t positions, int64_t classes, int64_t inner, float smoothing,
                                       double weight) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x);
  const float factor =
      static_cast<float>(weight * static_cast<double>(control->loss_scale) / static_cast<double>(positions));
  const float even = smoothing / static_cast<float>(classes);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t start = start_of<ADJACENT>(p, classes, inner), stride = ADJACENT ? 1 : inner;
    const Softmax s = softmax<LANES>(logits + start, classes, stride, lane);
    const int64_t t = target[p];
    const bool valid = t >= 0 && t < classes;
    for (int64_t c = lane; c < classes; c += LANES) {
      const float gradient = s.gradient(to_float(logits[start + c * stride]), c, t, smoothing, even);
      dlogits[start + c * stride] = from_float<T>(valid ? gradient * factor : 0.0f);
    }
  }
}

constexpr int TERMS = 32;

struct Terms {
  const float* loss[TERMS];
  double weight[TERMS];
  int count;
};

__global__ void weighted_sum(Terms terms, float* total, bool more) {
  double sum = more ? static_cast<double>(total[0]) : 0.0;
  for (int i = 0; i < terms.count; ++i) sum += terms.weight[i] * static_cast<double>(terms.loss[i][0]);
  total[0] = static_cast<float>(sum);
}

}  // namespace mbc

extern "C" const char* mbc_softmax_cross_entropy(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const auto* target = in<int32_t>(call, 1);
  float *loss = out<float>(call, 2), *correct = out<float>(call, 3);
  Score* partial = a.parts > 1 ? out<Score>(call, 4) : nullptr;
  const float smoothing = static_cast<float>(call.reals[0]);
  const unsigned parts = static_cast<unsigned>(a.parts);
  MBC_FOR_TYPE(a.type, T, {
    for_adjacency(a, [&](auto adjacent, dim3 block) {
      MBC_LAUNCH((cross_entropy<T, adjacent>), parts, block, call.stream, in<T>(call, 0), target, partial, loss,
                 correct, positions, a.channels, a.inner, smoothing);
    });
  });
  merge(partial, a.parts, loss, correct, positions, call.stream);
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const auto* target = in<int32_t>(call, 1);
  const auto* control = in<MbcControl>(call, 2);
  const float smoothing = static_cast<float>(call.reals[0]);
  const double weight = call.reals[1];
  MBC_FOR_TYPE(a.type, T, {
    for_adjacency(a, [&](auto adjacent, dim3 block) {
      MBC_LAUNCH((cross_entropy_backward<T, adjacent>), blocks_for(positions, static_cast<int>(block.y)), block,
                 call.stream, in<T>(call, 0), target, control, out<T>(call, 3), positions, a.channels, a.inner,
                 smoothing, weight);
    });
  });
  return launched();
}

extern "C" const char* mbc_weighted_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WeightedSumArguments>(call);
  const auto at = operands_of_weighted_sum(call);
  for (int64_t done = 0; done < a.inputs; done += TERMS) {
    Terms terms{};
    for (; terms.count < TERMS && done + terms.count < a.inputs; ++terms.count) {
      const int i = static_cast<int>(done) + terms.count;
      terms.loss[terms.count] = at.losses[i];
      terms.weight[terms.count] = call.reals[i];
    }
    MBC_LAUNCH(weighted_sum, 1, 1, call.stream, terms, at.total.as<float>(), done > 0);
  }
  return launched();
}
