// Backward pass of batch normalization over the result x of a 1x1 convolution: its reductions, and the gradient of x. x
// is recomputed with additions in the same order, and neither read nor written (fused rematerialization).
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      image, weights and the gradient of the normalized x (or of ReLU's output) in; two sums for each channel,
//            or the gradient of x, out.
#include "conv1x1.cuh"
#include "conv1x1_bn_backward_operands.h"

namespace mbc {

template <typename T, typename F>
const char* apply_backward(const MbcCall& call, const Conv1x1BnBackwardOperands& at, const F& f) {
  const MapSource<T, F> source({nullptr, at.dy}, at.dx, f);
  return run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, ChannelMap<F>{f}, nullptr);
}

template <typename T, typename R>
const char* run_reduction(const MbcCall& call, const Conv1x1BnBackwardOperands& at, const R& sums) {
  const TensorSource<T, true, false> source{{nullptr, at.dy}};
  return run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, sums, at.workspace);
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1_unstored_bn_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    const auto at = operands_of_conv1x1_unstored_bn_backward(call);
    const int64_t count = arguments<Conv1x1BnBackwardArguments>(call).count;
    return apply_backward<decltype(of)>(call, at, normalize_backward(at, eps(call, 0), count));
  });
}
extern "C" const char* mbc_conv1x1_unstored_bn_relu_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto at = operands_of_conv1x1_unstored_bn_relu_backward(call);
    const int64_t count = arguments<Conv1x1BnBackwardArguments>(call).count;
    const NormalizeBackward backward = normalize_backward(at, eps(call, 1), count);
    return apply_backward<T>(call, at, NormalizeReluBackward<T>{normalize(at, eps(call, 0)), backward});
  });
}
extern "C" const char* mbc_conv1x1_unstored_bn_relu_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1RematArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto at = operands_of_conv1x1_unstored_bn_relu_bn_reduce(call);
    const Normalize forward = normalize(at, eps(call, 0));
    return run_reduction<T>(call, at, BnReluBackwardReduction<T>(sums_of(at, eps(call, 1)), forward));
  });
}
extern "C" const char* mbc_conv1x1_unstored_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    const auto at = operands_of_conv1x1_unstored_bn_reduce(call);
    return run_reduction<decltype(of)>(call, at, sums_of(at, eps(call, 0)));
  });
}
