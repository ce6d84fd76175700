// Batch normalization with the activation after it (silu, hardswish, relu6), forward and backward, in one pass over
// memory each. The backward pass recomputes the activation's input from the convolution's output, which it reads
// anyway: the values between the two are never stored.
//
// Bytes      every operand in once, every result out once.
// Kernels    as in batch_norm_relu.cu, with the same shapes of threads, shared memory and registers.
// Limit      memory bandwidth; the exponential and the division of silu take about as long.
#include "activations.cuh"
#include "batch_norm_relu.cuh"

namespace mbc {

template <typename F>
struct NormalizeActivation {
  Normalize normalize;
  using Channel = Normalize::Channel;
  __device__ Channel load(int64_t c) const { return normalize.load(c); }
  __device__ float operator()(const Channel& channel, float x, float) const {
    return F{}(normalize(channel, x, 0.0f));
  }
};

// Operands: x, mean and variance, scale and shift if there are any; the result.
template <typename F>
const char* normalize_activation(const MbcCall& call) {
  const auto& a = arguments<FusedMapArguments>(call);
  const NormalizeActivation<F> f{normalize(call, 1, a.affine, eps(call, 0))};
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{in<T>(call, 0), nullptr};
    map_channels<0>(call.stream, a.layout, a.rows, a.channels, a.inner, x, out<T>(call, a.affine ? 5 : 3), f);
  });
  return launched();
}

// Operands: those of the forward pass, the gradient of the activation's output, dgamma and dbeta; dx. `Through` by the
// type of elements.
template <template <typename> typename Through>
const char* normalize_activation_backward(const MbcCall& call) {
  const auto& a = arguments<FusedMapArguments>(call);
  const int dy = a.affine ? 5 : 3;
  const Normalize forward = normalize(call, 1, a.affine, eps(call, 0));
  const NormalizeBackward backward{forward.mean, forward.variance, in<float>(call, dy + 1), in<float>(call, dy + 2),
                                   forward.gamma, eps(call, 1), static_cast<float>(a.count)};
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{in<T>(call, 0), in<T>(call, dy)};
    map_channels<1>(call.stream, a.layout, a.rows, a.channels, a.inner, x, out<T>(call, dy + 3),
                    NormalizeActivationBackward<Through<T>>{forward, backward});
  });
  return launched();
}

// Operands: those of the forward pass, and the gradient of the activation's output; dgamma, dbeta, workspace.
template <template <typename> typename Through>
const char* normalize_activation_reduce(const MbcCall& call) {
  const auto& a = arguments<FusedSumArguments>(call);
  const int dy = a.affine ? 5 : 3;
  void* workspace = a.parts > 1 ? call.pointers[dy + 3] : nullptr;
  const Normalize forward = normalize(call, 1, a.affine, eps(call, 0));
  const BnBackwardReduction sums{forward.mean, forward.variance, out<float>(call, dy + 1), out<float>(call, dy + 2),
                                 eps(call, 1), a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{in<T>(call, 0), in<T>(call, dy)};
    reduce_channels<true>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, x, workspace,
                          BnActivationBackwardReduction<Through<T>>(sums, forward));
  });
  return launched();
}

template <typename>
using ThroughSilu = ThroughInput<SiluBackward>;
template <typename>
using ThroughHardSwish = ThroughInput<HardSwishBackward>;
// Between 0 and 6 the output is equal to the input. A value below 6 that is rounded to 6 when stored passes its
// gradient.
template <typename>
using ThroughRelu6 = ThroughInput<Relu6Backward>;

}  // namespace mbc

extern "C" const char* mbc_batch_normalize_silu(const MbcCall& call) {
  return mbc::normalize_activation<mbc::Silu>(call);
}
extern "C" const char* mbc_batch_normalize_silu_backward(const MbcCall& call) {
  return mbc::normalize_activation_backward<mbc::ThroughSilu>(call);
}
extern "C" const char* mbc_batch_normalize_silu_bn_reduce(const MbcCall& call) {
  return mbc::normalize_activation_reduce<mbc::ThroughSilu>(call);
}

extern "C" const char* mbc_batch_normalize_hardswish(const MbcCall& call) {
  return mbc::normalize_activation<mbc::HardSwish>(call);
}
extern "C" const char* mbc_batch_normalize_hardswish_backward(const MbcCall& call) {
  return mbc::normalize_activation_backward<mbc::ThroughHardSwish>(call);
}
extern "C" const char* mbc_batch_normalize_hardswish_bn_reduce(const MbcCall& call) {
  return mbc::normalize_activation_reduce<mbc::ThroughHardSwish>(call);
}

extern "C" const char* mbc_batch_normalize_relu6(const MbcCall& call) {
  return mbc::normalize_activation<mbc::Relu6>(call);
}
extern "C" const char* mbc_batch_normalize_relu6_backward(const MbcCall& call) {
  return mbc::normalize_activation_backward<mbc::ThroughRelu6>(call);
}
extern "C" const char* mbc_batch_normalize_relu6_bn_reduce(const MbcCall& call) {
  return mbc::normalize_activation_reduce<mbc::ThroughRelu6>(call);
}
