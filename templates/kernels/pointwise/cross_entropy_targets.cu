// Softmax cross entropy with targets that are distributions over the classes, and its gradients: given probabilities
// ([rows, classes, inner] like the logits), or classes with weights, where positions may be ignored. The cross entropy
// less the entropy of the probabilities is their Kullback-Leibler divergence.
//
// Bytes      loss: logits and target in. Gradient: the same in, the gradient out. Logits are read for the maximum, the
//            sum and the result, from the second time on from the cache.
// Threads    256: a warp for each position if classes are adjacent, else a thread for each position.
// Shared     the classes' weights.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth, and latency for few positions.
#include "mbc_control.h"
#include "cross_entropy.cuh"
#include "cross_entropy_targets_arguments.h"

namespace mbc {

constexpr int MOST_WEIGHTS = 256;  // classes; as in mbc/ops/weighted_cross_entropy.py

struct Weights {
  float of[MOST_WEIGHTS];
  int count;  // 0: every class counts 1

  Weights(const MbcCall& call, int first, int64_t classes, bool weighted) : count(0) {
    if (weighted)
      for (; count < classes; ++count) of[count] = static_cast<float>(call.reals[first + count]);
  }
};

// Called once by all threads of the block, before weights are read.
__device__ inline const float* shared_weights(const Weights& weights) {
  __shared__ float shared[MOST_WEIGHTS];
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int c = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); c < weights.count; c += threads)
    shared[c] = weights.of[c];
  __syncthreads();
  return weights.count > 0 ? shared : nullptr;
}

enum class Position { COUNTS, IGNORED, INVALID };

// A target returns, for a position, the share `operator()(c)` that class c has of it; smoothing leaves `keep` to the
// target and gives `even` to each class.
template <typename T>
struct Probabilities {
  const T* target;
  float keep, even;
  bool divergence;

  struct At {
    const T* row;
    int64_t stride;
    float keep, even;
    bool divergence;
    __device__ float operator()(int64_t c) const { return keep * to_float(row[c * stride]) + even; }
    // The term of an entropy in place of the logarithm of a probability, and its derivative by the share.
    __device__ float less(float share) const { return divergence ? logf(share) : 0.0f; }
    __device__ float slope(int64_t c) const {
      return divergence ? logf(to_float(row[c * stride])) + 1.0f : 0.0f;
    }
    __device__ Position state() const { return Position::COUNTS; }
  };
  __device__ const float* class_weights() const { return nullptr; }
  __device__ At at(int64_t, int64_t start, int64_t stride, const float*) const {
    return {target + start, stride, keep, even, divergence};
  }

  // The class of the largest share; among equal shares the first.
  template <int LANES>
  __device__ static int64_t best(const At& at, int64_t classes, int lane) {
    float greatest = -INFINITY;
    long long best = INT64_MAX;
    for (int64_t c = lane; c < classes; c += LANES) {
      const float share = to_float(at.row[c * at.stride]);
      if (share > greatest) greatest = share, best = c;
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
      const float share = __shfl_xor_sync(0xffffffffu, greatest, step);
      const long long other = __shfl_xor_sync(0xffffffffu, best, step);
      if (share > greatest || (share == greatest && other < best)) greatest = share, best = other;
    }
    return best;
  }
};

struct WeightedClasses {
  const int32_t* target;
  int64_t classes;
  bool ignores;
  int64_t ignored;
  float keep, even;
  Weights weights;

  struct At {
    int64_t own;
    float share, even;
    const float* weights;
    Position position;
    __device__ float operator()(int64_t c) const {
      return (c == own ? share : 0.0f) + (weights == nullptr ? even : even * weights[c]);
    }
    __device__ float less(float) const { return 0.0f; }
    __device__ float slope(int64_t) const { return 0.0f; }
    __device__ Position state() const { return position; }
  };
  __device__ const float* class_weights() const { return shared_weights(weights); }
  __device__ At at(int64_t p, int64_t, int64_t, const float* shared) const {
    const int64_t t = target[p];
    if (ignores && t == ignored) return {t, 0.0f, 0.0f, shared, Position::IGNORED};
    if (t < 0 || t >= classes) return {t, 0.0f, 0.0f, shared, Position::INVALID};
    return {t, shared == nullptr ? keep : keep * shared[t], even, shared, Position::COUNTS};
  }
  template <int LANES>
  __device__ static int64_t best(const At& at, int64_t, int) { return at.own; }
};

template <int LANES>
__device__ inline float sum_lanes(float v) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

template <typename T, bool ADJACENT, typename Targets>
__global__ void target_cross_entropy(const T* logits, const Targets targets, Score* partial, int64_t positions,
                                     int64_t classes, int64_t inner) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x % LANES);
  const float* weights = targets.class_weights();
  Score score{0.0, 0.0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t start = start_of<ADJACENT>(p, classes, inner), stride = ADJACENT ? 1 : inner;
    const auto at = targets.at(p, start, stride, weights);
    if (at.state() == Position::IGNORED) continue;
    const Softmax s = softmax<LANES>(logits + start, classes, stride, lane);
    const float logarithm = log1pf(s.others);
    float value = 0.0f;
    for (int64_t c = lane; c < classes; c += LANES) {
      const float share = at(c);
      if (share != 0.0f) value += share * (at.less(share) + logarithm - (to_float(logits[start + c * stride]) - s.greatest));
    }
    value = sum_lanes<LANES>(value);
    const int64_t best = Targets::template best<LANES>(at, classes, lane);
    if (lane != 0) continue;
    score.loss += at.state() == Position::INVALID ? NAN : value;  // `guard` then skips this step
    if (s.best == best) score.correct += 1.0;
  }
  score = sum_block(score);
  if (threadIdx.x == 0 && threadIdx.y == 0) partial[blockIdx.x] = score;
}

// OF_TARGET: the gradient of the target probabilities, else of the logits.
template <typename T, bool ADJACENT, bool OF_TARGET, typename Targets>
__global__ void target_cross_entropy_backward(const T* logits, const Targets targets, const MbcControl* control, T* gradient,
                                              int64_t positions, int64_t classes, int64_t inner, double weight,
                                              float keep, Mean mean) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x % LANES);
  const float factor = static_cast<float>(weight * static_cast<double>(control->loss_scale) / mean.divisor());
  const float* weights = targets.class_weights();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t start = start_of<ADJACENT>(p, classes, inner), stride = ADJACENT ? 1 : inner;
    const auto at = targets.at(p, start, stride, weights);
    if (at.state() != Position::COUNTS) {
      for (int64_t c = lane; c < classes; c += LANES) gradient[start + c * stride] = from_float<T>(0.0f);
      continue;
    }
    const Softmax s = softmax<LANES>(logits + start, classes, stride, lane);
    const float total = 1.0f + s.others, logarithm = log1pf(s.others);
    float shares = 0.0f;  // 1 for probabilities
    if (!OF_TARGET) {
      for (int64_t c = lane; c < classes; c += LANES) shares += at(c);
      shares = sum_lanes<LANES>(shares);
    }
    for (int64_t c = lane; c < classes; c += LANES) {
      const float v = to_float(logits[start + c * stride]) - s.greatest;
      // The largest class' probability is 1 - others / total: this keeps its digits if a network is nearly certain.
      const float of_logit = c == s.best ? (shares - at(c)) - shares * (s.others / total)
                                         : shares * (expf(v) / total) - at(c);
      gradient[start + c * stride] = from_float<T>((OF_TARGET ? keep * (logarithm - v) + at.slope(c) : of_logit) * factor);
    }
  }
}

__global__ void class_weight_sum(const WeightedClasses targets, Score* partial, int64_t positions) {
  const float* weights = targets.class_weights();
  Score score{0.0, 0.0};
  for (int64_t p = thread_index(); p < positions; p += thread_count()) {
    const auto at = targets.at(p, 0, 0, weights);
    if (at.state() != Position::COUNTS) continue;
    score.loss += static_cast<double>(at.share);
    score.correct += 1.0;
  }
  score = sum_block(score);
  if (threadIdx.x == 0) partial[blockIdx.x] = score;
}

template <typename T, typename Targets, typename Arguments>
void run_targets(const MbcCall& call, const Arguments& a, const Targets& targets, Score* partial) {
  const int64_t positions = a.rows * a.inner;
  const unsigned parts = static_cast<unsigned>(a.parts);
  for_adjacency(a, [&](auto adjacent, dim3 block) {
    MBC_LAUNCH((target_cross_entropy<T, adjacent, Targets>), parts, block, call.stream, in<T>(call, 0), targets, partial,
               positions, a.channels, a.inner);
  });
}

template <typename T, bool OF_TARGET, typename Targets, typename Arguments>
void run_targets_backward(const MbcCall& call, const Arguments& a, const Targets& targets, const MbcControl* control,
                          T* gradient, double weight, float keep, const Mean& mean) {
  const int64_t positions = a.rows * a.inner;
  for_adjacency(a, [&](auto adjacent, dim3 block) {
    MBC_LAUNCH((target_cross_entropy_backward<T, adjacent, OF_TARGET, Targets>),
               blocks_for(positions, static_cast<int>(block.y)), block, call.stream, in<T>(call, 0), targets, control,
               gradient, positions, a.channels, a.inner, weight, keep, mean);
  });
}

template <typename Arguments>
WeightedClasses weighted_classes(const MbcCall& call, const Arguments& a, const int32_t* target, float smoothing,
                                 int first) {
  const float even = smoothing / static_cast<float>(a.channels);
  return {target, a.channels, a.ignores != 0, a.ignored, 1.0f - smoothing, even,
          Weights(call, first, a.channels, a.weighted != 0)};
}

// `correct` may be nullptr.
inline const char* run_probabilities(const MbcCall& call, float smoothing, bool divergence, float* loss, float* correct,
                                     Score* partial) {
  const auto& a = arguments<CrossEntropyArguments>(call);
  const float even = smoothing / static_cast<float>(a.channels);
  const Mean mean{nullptr, 1.0, static_cast<double>(a.rows * a.inner)};
  MBC_FOR_TYPE(a.type, T, {
    run_targets<T>(call, a, Probabilities<T>{in<T>(call, 1), 1.0f - smoothing, even, divergence}, partial);
  });
  MBC_LAUNCH(add_target_scores, 1, THREADS, call.stream, partial, a.parts, loss, correct, mean);
  return launched();
}

inline const char* run_probabilities_backward(const MbcCall& call, float smoothing, double weight, bool divergence) {
  const auto& a = arguments<CrossEntropyArguments>(call);
  const auto* control = in<MbcControl>(call, 2);
  const float keep = 1.0f - smoothing, even = smoothing / static_cast<float>(a.channels);
  const Mean mean{nullptr, 1.0, static_cast<double>(a.rows * a.inner)};
  MBC_FOR_TYPE(a.type, T, {
    const Probabilities<T> targets{in<T>(call, 1), keep, even, divergence};
    if (a.side == 0)
      run_targets_backward<T, false>(call, a, targets, control, out<T>(call, 3), weight, keep, mean);
    else
      run_targets_backward<T, true>(call, a, targets, control, out<T>(call, 3), weight, keep, mean);
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_soft_target_cross_entropy(const MbcCall& call) {
  using namespace mbc;
  return run_probabilities(call, static_cast<float>(call.reals[0]), false, out<float>(call, 2), out<float>(call, 3),
                           out<Score>(call, 4));
}

extern "C" const char* mbc_soft_target_cross_entropy_backward(const MbcCall& call) {
  return mbc::run_probabilities_backward(call, static_cast<float>(call.reals[0]), call.reals[1], false);
}

extern "C" const char* mbc_kl_divergence(const MbcCall& call) {
  using namespace mbc;
  return run_probabilities(call, 0.0f, true, out<float>(call, 2), nullptr, out<Score>(call, 3));
}

extern "C" const char* mbc_kl_divergence_backward(const MbcCall& call) {
  return mbc::run_probabilities_backward(call, 0.0f, call.reals[0], true);
}

extern "C" const char* mbc_class_weight_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ClassWeightArguments>(call);
  float* sums = out<float>(call, 1);
  Score* partial = out<Score>(call, 2);
  MBC_LAUNCH(class_weight_sum, static_cast<unsigned>(a.parts), THREADS, call.stream,
             weighted_classes(call, a, in<int32_t>(call, 0), 0.0f, 0), partial, a.positions);
  MBC_LAUNCH(add_target_scores, 1, THREADS, call.stream, partial, a.parts, sums, sums + 1, (Mean{nullptr, 1.0, 1.0}));
  return launched();
}

extern "C" const char* mbc_weighted_cross_entropy_mean(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WeightedCrossEntropyArguments>(call);
  float *loss = out<float>(call, 3), *correct = out<float>(call, 4);
  Score* partial = out<Score>(call, 5);
  const auto targets = weighted_classes(call, a, in<int32_t>(call, 1), static_cast<float>(call.reals[0]), 2);
  const Mean mean{in<float>(call, 2), call.reals[1], static_cast<double>(a.rows * a.inner)};
  MBC_FOR_TYPE(a.type, T, { run_targets<T>(call, a, targets, partial); });
  MBC_LAUNCH(add_target_scores, 1, THREADS, call.stream, partial, a.parts, loss, correct, mean);
  return launched();
}

extern "C" const char* mbc_weighted_cross_entropy_mean_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WeightedCrossEntropyArguments>(call);
  const float smoothing = static_cast<float>(call.reals[0]);
  const auto targets = weighted_classes(call, a, in<int32_t>(call, 1), smoothing, 3);
  const Mean mean{in<float>(call, 2), call.reals[1], static_cast<double>(a.rows * a.inner)};
  MBC_FOR_TYPE(a.type, T, {
    run_targets_backward<T, false>(call, a, targets, in<MbcControl>(call, 3), out<T>(call, 4), call.reals[2],
                                   1.0f - smoothing, mean);
  });
  return launched();
}
