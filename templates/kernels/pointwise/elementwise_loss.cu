// Losses that compare two tensors element by element (mse, l1, smooth l1, binary cross entropy of logits or probabilities),
// and their gradients. The layout does not matter, because both operands have the same one.
//
// Bytes      loss: both operands in. Gradient: the same in, the gradient out, 16 bytes at a time if aligned.
// Threads    256 in a grid-stride loop.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth.
#include "mbc_control.h"
#include "loss.cuh"
#include "elementwise_loss_arguments.h"

namespace mbc {

// A loss: its value for a prediction x and a target y, and the derivatives by both. NaN is passed on.
struct Mse {
  __device__ float value(float x, float y) const { return (x - y) * (x - y); }
  __device__ float by_prediction(float x, float y) const { return 2.0f * (x - y); }
  __device__ float by_target(float x, float y) const { return by_prediction(y, x); }
};

struct L1 {
  __device__ float value(float x, float y) const { return fabsf(x - y); }
  __device__ float by_prediction(float x, float y) const {
    const float d = x - y;
    return d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : d;
  }
  __device__ float by_target(float x, float y) const { return by_prediction(y, x); }
};

struct SmoothL1 {
  float beta;
  __device__ float value(float x, float y) const {
    const float d = fabsf(x - y);
    return d < beta ? 0.5f * d * d / beta : d - 0.5f * beta;
  }
  __device__ float by_prediction(float x, float y) const {
    const float slope = (x - y) / beta;
    return slope > 1.0f ? 1.0f : slope < -1.0f ? -1.0f : slope;
  }
  __device__ float by_target(float x, float y) const { return by_prediction(y, x); }
};

// The logarithm is that of 1 + exp(-|x|), which cannot overflow, and sums have terms of one sign, so that nothing
// cancels if the network is nearly certain.
struct BinaryCrossEntropy {
  float pos_weight;
  __device__ float value(float x, float y) const {
    const float logarithm = log1pf(expf(-fabsf(x)));
    return pos_weight * y * (logarithm + (x < 0.0f ? -x : 0.0f)) + (1.0f - y) * (logarithm + (x > 0.0f ? x : 0.0f));
  }
  __device__ float by_prediction(float x, float y) const {
    const float small = expf(-fabsf(x)), whole = 1.0f + small;
    const float one = (x > 0.0f ? 1.0f : small) / whole, zero = (x > 0.0f ? small : 1.0f) / whole;
    return (1.0f - y) * one - pos_weight * y * zero;
  }
  __device__ float by_target(float x, float y) const {
    const float more = pos_weight - 1.0f;
    if (more == 0.0f) return -x;
    return more * (log1pf(expf(-fabsf(x))) + (x < 0.0f ? -x : 0.0f)) - x;
  }
};

// Binary cross entropy of a probability; a logarithm is at least -100, and the gradient's divisor at least 1e-12.
struct ProbabilityCrossEntropy {
  __device__ static float logarithm(float p) {
    const float value = logf(p);
    return value < -100.0f ? -100.0f : value;
  }
  __device__ float value(float p, float y) const {
    return -(y * logarithm(p) + (1.0f - y) * logarithm(1.0f - p));
  }
  __device__ float by_prediction(float p, float y) const {
    const float variance = p * (1.0f - p);
    return (p - y) / (variance < 1e-12f ? 1e-12f : variance);
  }
  __device__ float by_target(float p, float) const { return logarithm(1.0f - p) - logarithm(p); }
};

template <typename F>
struct ByPrediction {
  F f;
  __device__ float operator()(float x, float y) const { return f.by_prediction(x, y); }
};
template <typename F>
struct ByTarget {
  F f;
  __device__ float operator()(float x, float y) const { return f.by_target(x, y); }
};

template <typename T, typename F>
__global__ void elementwise_loss(const T* prediction, const T* target, Score* partial, float* loss, int64_t vectors,
                                 int64_t elements, F f) {
  constexpr int N = WIDTH<T>;
  Score score{0.0, 0.0};
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    const Vec<T, N> x = load<N>(prediction + i * N), y = load<N>(target + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) score.loss += static_cast<double>(f.value(to_float(x.v[j]), to_float(y.v[j])));
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += thread_count())
    score.loss += static_cast<double>(f.value(to_float(prediction[e]), to_float(target[e])));
  store_score(score, partial, loss, nullptr, static_cast<double>(elements));
}

template <typename T, typename D>
__global__ void elementwise_loss_backward(const T* prediction, const T* target, const MbcControl* control, T* gradient,
                                          int64_t vectors, int64_t elements, double factor, D derivative) {
  constexpr int N = WIDTH<T>;
  const float scale = static_cast<float>(factor * static_cast<double>(control->loss_scale));
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    Vec<T, N> x = load<N>(prediction + i * N);
    const Vec<T, N> y = load<N>(target + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) x.v[j] = from_float<T>(derivative(to_float(x.v[j]), to_float(y.v[j])) * scale);
    store(gradient + i * N, x);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += thread_count())
    gradient[e] = from_float<T>(derivative(to_float(prediction[e]), to_float(target[e])) * scale);
}

template <typename F>
const char* run_loss(const MbcCall& call, F f) {
  const auto& a = arguments<ElementwiseLossArguments>(call);
  float* loss = out<float>(call, 2);
  Score* partial = a.parts > 1 ? out<Score>(call, 3) : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const T *prediction = in<T>(call, 0), *target = in<T>(call, 1);
    const int64_t vectors = aligned(prediction, 16) && aligned(target, 16) ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((elementwise_loss<T, F>), static_cast<unsigned>(a.parts), THREADS, call.stream, prediction, target,
               partial, loss, vectors, a.elements, f);
  });
  merge(partial, a.parts, loss, nullptr, a.elements, call.stream);
  return launched();
}

template <typename D>
const char* run_derivative(const MbcCall& call, D derivative) {
  const auto& a = arguments<ElementwiseLossArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T *prediction = in<T>(call, 0), *target = in<T>(call, 1);
    T* gradient = out<T>(call, 3);
    const bool whole = aligned(prediction, 16) && aligned(target, 16) && aligned(gradient, 16);
    const int64_t vectors = whole ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((elementwise_loss_backward<T, D>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream,
               prediction, target, in<MbcControl>(call, 2), gradient, vectors, a.elements, call.reals[0], derivative);
  });
  return launched();
}

template <typename F>
const char* run_loss_backward(const MbcCall& call, F f) {
  const bool of_target = arguments<ElementwiseLossArguments>(call).side != 0;
  return of_target ? run_derivative(call, ByTarget<F>{f}) : run_derivative(call, ByPrediction<F>{f});
}

}  // namespace mbc

extern "C" {

const char* mbc_mse(const MbcCall& call) { return mbc::run_loss(call, mbc::Mse{}); }
const char* mbc_l1(const MbcCall& call) { return mbc::run_loss(call, mbc::L1{}); }
const char* mbc_smooth_l1(const MbcCall& call) { return mbc::run_loss(call, mbc::SmoothL1{mbc::real(call, 0)}); }
const char* mbc_binary_cross_entropy(const MbcCall& call) {
  return mbc::run_loss(call, mbc::BinaryCrossEntropy{mbc::real(call, 0)});
}
const char* mbc_probability_cross_entropy(const MbcCall& call) {
  return mbc::run_loss(call, mbc::ProbabilityCrossEntropy{});
}
const char* mbc_probability_cross_entropy_backward(const MbcCall& call) {
  return mbc::run_loss_backward(call, mbc::ProbabilityCrossEntropy{});
}
const char* mbc_mse_backward(const MbcCall& call) { return mbc::run_loss_backward(call, mbc::Mse{}); }
const char* mbc_l1_backward(const MbcCall& call) { return mbc::run_loss_backward(call, mbc::L1{}); }
const char* mbc_smooth_l1_backward(const MbcCall& call) {
  return mbc::run_loss_backward(call, mbc::SmoothL1{mbc::real(call, 1)});
}
const char* mbc_binary_cross_entropy_backward(const MbcCall& call) {
  return mbc::run_loss_backward(call, mbc::BinaryCrossEntropy{mbc::real(call, 1)});
}

}  // extern "C"
