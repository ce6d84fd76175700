// The backward pass of batch normalization with the activation after it (silu, hardswish, relu6), the reductions and the
// gradient in one pass over memory each. Both recompute the activation's input from the convolution's output, which they
// read anyway: the values between the two are never stored.
//
// Bytes      every operand in once, every result out once.
// Kernels    as in batch_norm_relu.cu, with the same shapes of threads, shared memory and registers.
// Limit      memory bandwidth; the exponential and the division of silu take about as long.
#include "activations.cuh"
#include "batch_norm_relu.cuh"
#include "batch_norm_activation_operands.h"

namespace mbc {

// `Through` by the type of elements.
template <template <typename> typename Through>
const char* normalize_activation_backward(const MbcCall& call, const BatchNormActivationOperands& at) {
  const auto& a = arguments<FusedMapArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const NormalizeBackward backward = normalize_backward(at, eps(call, 1), a.count);
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{at.x, at.dy};
    map_image<1>(call, a, x, at.dx.as<T>(), NormalizeActivationBackward<Through<T>>{forward, backward});
  });
  return launched();
}

template <template <typename> typename Through>
const char* normalize_activation_reduce(const MbcCall& call, const BatchNormActivationOperands& at) {
  const auto& a = arguments<FusedSumArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const BnBackwardReduction sums = sums_of(at, eps(call, 1), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    const TensorSource<T, true, false> source{{at.x, at.dy}};
    reduce_image<T>(call, a, source, at.workspace, BnActivationBackwardReduction<Through<T>>(sums, forward));
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

MBC_LAUNCHER(batch_normalize_silu_backward, normalize_activation_backward<ThroughSilu>)
MBC_LAUNCHER(batch_normalize_silu_bn_reduce, normalize_activation_reduce<ThroughSilu>)

MBC_LAUNCHER(batch_normalize_hardswish_backward, normalize_activation_backward<ThroughHardSwish>)
MBC_LAUNCHER(batch_normalize_hardswish_bn_reduce, normalize_activation_reduce<ThroughHardSwish>)

MBC_LAUNCHER(batch_normalize_relu6_backward, normalize_activation_backward<ThroughRelu6>)
MBC_LAUNCHER(batch_normalize_relu6_bn_reduce, normalize_activation_reduce<ThroughRelu6>)
