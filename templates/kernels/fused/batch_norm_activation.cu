// Batch normalization with the activation after it (silu, hardswish, relu6), forward and backward, in one pass over
// memory each. The backward pass recomputes the activation's input from the convolution's output, which it reads
// anyway: the values between the two are never stored.
//
// Bytes      every operand in once, every result out once.
// Kernels    as in batch_norm_relu.cu, with the same shapes of threads, shared memory and registers.
// Limit      memory bandwidth; the exponential and the division of silu take about as long.
#include "activations.cuh"
#include "batch_norm_relu.cuh"
#include "batch_norm_activation_operands.h"

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

template <typename F>
const char* normalize_activation(const MbcCall& call, const BatchNormActivationOperands& at) {
  const auto& a = arguments<FusedMapArguments>(call);
  const NormalizeActivation<F> f{normalize(at, eps(call, 0))};
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{at.x, nullptr};
    map_channels<0>(call.stream, a.layout, a.rows, a.channels, a.inner, x, at.y.as<T>(), f);
  });
  return launched();
}

// `Through` by the type of elements.
template <template <typename> typename Through>
const char* normalize_activation_backward(const MbcCall& call, const BatchNormActivationOperands& at) {
  const auto& a = arguments<FusedMapArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const NormalizeBackward backward = normalize_backward(at, eps(call, 1), a.count);
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{at.x, at.dy};
    map_channels<1>(call.stream, a.layout, a.rows, a.channels, a.inner, x, at.dx.as<T>(),
                    NormalizeActivationBackward<Through<T>>{forward, backward});
  });
  return launched();
}

template <template <typename> typename Through>
const char* normalize_activation_reduce(const MbcCall& call, const BatchNormActivationOperands& at) {
  const auto& a = arguments<FusedSumArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const BnBackwardReduction sums = sums_of(at, eps(call, 1), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{at.x, at.dy};
    reduce_channels<true>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, x, at.workspace,
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
  using namespace mbc;
  return normalize_activation<Silu>(call, operands_of_batch_normalize_silu(call));
}
extern "C" const char* mbc_batch_normalize_silu_backward(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_backward<ThroughSilu>(call, operands_of_batch_normalize_silu_backward(call));
}
extern "C" const char* mbc_batch_normalize_silu_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_reduce<ThroughSilu>(call, operands_of_batch_normalize_silu_bn_reduce(call));
}

extern "C" const char* mbc_batch_normalize_hardswish(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation<HardSwish>(call, operands_of_batch_normalize_hardswish(call));
}
extern "C" const char* mbc_batch_normalize_hardswish_backward(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_backward<ThroughHardSwish>(call, operands_of_batch_normalize_hardswish_backward(call));
}
extern "C" const char* mbc_batch_normalize_hardswish_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_reduce<ThroughHardSwish>(call, operands_of_batch_normalize_hardswish_bn_reduce(call));
}

extern "C" const char* mbc_batch_normalize_relu6(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation<Relu6>(call, operands_of_batch_normalize_relu6(call));
}
extern "C" const char* mbc_batch_normalize_relu6_backward(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_backward<ThroughRelu6>(call, operands_of_batch_normalize_relu6_backward(call));
}
extern "C" const char* mbc_batch_normalize_relu6_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return normalize_activation_reduce<ThroughRelu6>(call, operands_of_batch_normalize_relu6_bn_reduce(call));
}
