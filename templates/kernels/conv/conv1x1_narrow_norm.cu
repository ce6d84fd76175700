// 1x1 convolutions to at most four filters behind a norm and a (leaky) ReLU: a network's last layer. Batch and instance
// normalisation, channels last, in every precision.
//
// Neither the activation nor its gradient is stored: both follow from the norm's input x and from the few gradients g of
// a pixel. With s = 1 or the slope of the leaky ReLU, the sums over pixels
//
//   A[c, k] = sum s g[k] (x - mean)    B[c, k] = sum s g[k]
//
// give the filter gradient scale A + shift B, and the sums of the norm's gradient, sum over k of w[k, c] A and of w[k, c] B.
//
// Bytes      forward: x in, result out. Sums: x and g in. Backward: x and g in, the gradient of x out.
// Kernels    those of conv1x1_narrow.cuh with other neighbours; the parts of sums are added by `finish_norm_sums`.
// Limit      memory bandwidth.
#include "batch_norm.cuh"
#include "conv1x1_narrow.cuh"
#include "conv1x1_narrow_norm_arguments.h"
#include "conv1x1_narrow_norm_operands.h"
#include "loss.cuh"

namespace mbc {

constexpr int MOST_NORM_FILTERS = 4;  // equal to MOST_FILTERS in mbc/kernels/cuda/conv/conv1x1_narrow_norm.py

// A norm with a (leaky) ReLU, whose statistics are those of the batch or of each sample.
struct NormRelu {
  Normalize normalize;
  float slope;  // 0 for ReLU
  using Channel = Normalize::Channel;

  __device__ Channel channel_of(int64_t sample, int32_t channels, int32_t c) const {
    const Normalize& n = normalize;
    const int64_t at = sample * channels + c;
    return n.of(n.mean[at], n.variance[at], n.gamma ? n.gamma[c] : 1.0f, n.beta ? n.beta[c] : 0.0f);
  }
  // The factor of the gradient through ReLU.
  template <typename T>
  __device__ float passed(const Channel& channel, float x) const {
    return normalize(channel, x, 0.0f) > ROUNDS_TO_ZERO<T> ? 1.0f : slope;
  }

  static constexpr int SUMS = 2;
  template <typename T>
  __device__ void factors(const Channel& channel, float x, float (&factors)[SUMS]) const {
    const float s = passed<T>(channel, x);
    factors[0] = s * (x - channel.mean);
    factors[1] = s;
  }
};

// The same before a convolution and its bias.
struct BehindNorm : NormRelu {
  static constexpr int TABLE_WORDS = 3;
  const float* bias;
  __device__ void fill(float* table, int32_t channels) const {
    for (int32_t c = threadIdx.x; c < channels; c += THREADS) {
      const Channel channel = channel_of(blockIdx.y, channels, c);
      table[c] = channel.mean;
      table[channels + c] = channel.scale;
      table[2 * channels + c] = channel.shift;
    }
  }
  __device__ auto at(const float* table, int32_t channels, int32_t c) const {
    const auto mean = load<4>(table + c), scale = load<4>(table + channels + c), shift = load<4>(table + 2 * channels + c);
    return [=](float x, int h) {
      const float z = normalize({mean.v[h], scale.v[h], shift.v[h]}, x, 0.0f);
      return z < 0.0f ? (slope == 0.0f ? 0.0f : slope * z) : z;
    };
  }
  __device__ float finish(int k, float sum) const { return sum + bias[k]; }
};

// Adds the sums of all parts in a fixed order, in fp64: [samples, parts, channels, filters, 2]. A block takes a channel.
// `adds`: to the norm's sums, too.
template <typename T, int FILTERS>
__global__ void finish_norm_sums(const float* partial, int64_t parts, int64_t samples, int32_t channels, const T* weight,
                                 float* dw, float* dgamma, float* dbeta, NormRelu norm, bool accumulate, bool adds) {
  const int c = static_cast<int>(blockIdx.x);
  double of_weights[FILTERS] = {};
  wait_for_prior_grid();
  for (int64_t sample = 0; sample < samples; ++sample) {
    const Normalize::Channel channel = norm.channel_of(sample, channels, c);
    Score all{0.0, 0.0};
#pragma unroll
    for (int k = 0; k < FILTERS; ++k) {
      Score sums{0.0, 0.0};
      for (int64_t part = threadIdx.x; part < parts; part += THREADS) {
        const auto pair = load<2>(partial + (((sample * parts + part) * channels + c) * FILTERS + k) * 2);
        sums.loss += pair.v[0];
        sums.correct += pair.v[1];
      }
      __syncthreads();  // the scores before these have been read
      sums = sum_block(sums);
      const double w = to_float(weight[k * channels + c]);
      all.loss += w * sums.loss;
      all.correct += w * sums.correct;
      of_weights[k] += channel.scale * sums.loss + channel.shift * sums.correct;
    }
    const int64_t at = sample * channels + c;
    if (threadIdx.x > 0) continue;
    all.loss /= sqrt(norm.normalize.variance[at] + double{norm.normalize.eps});
    dgamma[at] = static_cast<float>((adds ? dgamma[at] : 0.0) + all.loss);
    dbeta[at] = static_cast<float>((adds ? dbeta[at] : 0.0) + all.correct);
  }
#pragma unroll
  for (int k = 0; k < FILTERS; ++k)
    if (float& gradient = dw[k * channels + c]; threadIdx.x == 0)
      gradient = static_cast<float>((accumulate ? gradient : 0.0) + of_weights[k]);
}

// The gradient of x.
template <typename T>
struct BeforeNorm {
  static constexpr bool READS = true;
  const T* x;
  NormRelu forward;
  NormalizeBackward backward;
  struct Channel {
    float mean, scale, shift, slope, lift;  // the first three forward; backward has the same mean and scale
  };

  __device__ Channel channel_of(int64_t sample, int32_t channels, int32_t c) const {
    const NormRelu::Channel f = forward.channel_of(sample, channels, c);
    const int64_t at = sample * channels + c;
    const auto prepared = backward.prepare(f.mean, backward.variance[at], backward.gamma ? backward.gamma[c] : 1.0f);
    const NormalizeBackward::Channel b = backward.with_sums(prepared, backward.dgamma[at], backward.dbeta[at]);
    return {f.mean, f.scale, f.shift, b.slope, b.shift};
  }
  __device__ float gradient(const Channel& c, float x, float d) const {
    return backward({c.mean, c.scale, c.slope, c.lift}, x, d * forward.passed<T>({c.mean, c.scale, c.shift}, x));
  }
};

template <typename Pointer>
using ElementOf = std::remove_const_t<std::remove_pointer_t<Pointer>>;

// Calls `run(a, count, f, x, norm)` with arguments, the number of filters, sizes, the norm's input and the norm. Reals: the
// slope of the leaky ReLU, eps.
template <typename Run>
const char* for_norm(const MbcCall& call, const Conv1x1NarrowNormOperands& at, const Run& run) {
  const auto& a = arguments<Conv1x1NarrowNormArguments>(call);
  const NormRelu norm{normalize(at, eps(call, 1)), real(call, 0)};
  return for_type_and_filters<MOST_NORM_FILTERS>(call, a, [&](auto element, auto count, const Conv1x1Narrow& f) {
    run(a, count, f, at.x.as<const decltype(element)>(), norm);
  });
}

inline const char* forward(const MbcCall& call, const Conv1x1NarrowNormOperands& at) {
  return for_norm(call, at, [&](const auto& a, auto count, const Conv1x1Narrow& f, const auto* x, const NormRelu& norm) {
    run_conv1x1_narrow<count>(call.stream, x, decltype(x)(at.weights), at.y, f, BehindNorm{norm, at.bias}, a.samples);
  });
}

inline const char* sums(const MbcCall& call, const Conv1x1NarrowNormOperands& at) {
  return for_norm(call, at, [&](const auto& a, auto count, const Conv1x1Narrow& f, const auto* x, const NormRelu& norm) {
    float* partial = at.workspace;
    sum_conv1x1_narrow<count>(call.stream, x, decltype(x)(at.dy), partial, a.parts, f, norm, a.samples);
    MBC_LAUNCH_NEXT((finish_norm_sums<ElementOf<decltype(x)>, count>), static_cast<unsigned>(a.channels), THREADS, call.stream, partial,
                    a.parts, a.samples, f.channels, decltype(x)(at.weights), at.dw.as<float>(),
                    at.dgamma.as<float>(), at.dbeta.as<float>(), norm, a.accumulate != 0,
                    a.accumulate != 0 && a.by_sample == 0);
  });
}

inline const char* backward(const MbcCall& call, const Conv1x1NarrowNormOperands& at) {
  return for_norm(call, at, [&](const auto& a, auto count, const Conv1x1Narrow& f, const auto* x, const NormRelu& norm) {
    const BeforeNorm<ElementOf<decltype(x)>> neighbours{x, norm, normalize_backward(at, eps(call, 1), a.count)};
    run_conv1x1_narrow_data<count>(call.stream, decltype(x)(at.dy), decltype(x)(at.weights), at.dx, f, neighbours, a.samples);
  });
}

}  // namespace mbc

MBC_LAUNCHER(norm_relu_conv1x1_narrow, forward)
MBC_LAUNCHER(norm_relu_conv1x1_narrow_sums, sums)
MBC_LAUNCHER(norm_relu_conv1x1_narrow_backward, backward)
