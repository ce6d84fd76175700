// 1x1 convolutions at a stride of one, in bf16 and fp16, channels last: alone, with batch statistics in the epilogue,
// or recomputed inside the reductions of batch normalization's backward pass (fused rematerialization), with or without
// writing the recomputed result.
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      alone: pixels and weights in, the result out. With a reduction also gradients and ReLU's output or bit
//            mask in; the gradient through ReLU out.
#include "conv1x1.cuh"
#include "conv1x1_operands.h"
#include "batch_statistics.cuh"

namespace mbc {

template <GemmResult M, typename T, typename S>
const char* run_conv1x1_reduction(const MbcCall& call, const Conv1x1Operands& at, const S& source) {
  return run_conv1x1<M, T>(call, at.x, source, sums_of(at, eps(call, 0)), at.workspace);
}

// Reductions over the sum of two gradients through ReLU, by ReLU's output or its bit mask (BITMASK); the gradient through
// ReLU is written as well.
template <GemmResult M, bool BITMASK>
const char* run_add_relu_backward_reduction(const MbcCall& call, const Conv1x1Operands& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    const ReluBackwardSource<T, true, true, Relu> source{{at.relu}, at.dy, at.dy2, nullptr, at.d};
    return run_conv1x1_reduction<M, T>(call, at, source);
  });
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    return run_conv1x1<GemmResult::X>(call, out<T>(call, 2), TensorSource<T, false, false>{}, NoReduction{}, nullptr);
  });
}
extern "C" const char* mbc_conv1x1_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto at = operands_of_conv1x1_statistics(call);
    const EpilogueStatistics<T> statistics{{nullptr, 0, at.mean, at.variance}};
    return run_conv1x1<GemmResult::X, T>(call, at.x, TensorSource<T, false, false>{}, statistics, at.workspace);
  });
}
extern "C" const char* mbc_conv1x1_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto at = operands_of_conv1x1_bn_reduce(call);
    return run_conv1x1_reduction<GemmResult::X, T>(call, at, TensorSource<T, true, false>{{nullptr, at.dy}});
  });
}
MBC_LAUNCHER(conv1x1_add_relu_backward_bn_reduce, run_add_relu_backward_reduction<GemmResult::X, false>)
MBC_LAUNCHER(conv1x1_add_relu_backward_masked_bn_reduce, run_add_relu_backward_reduction<GemmResult::X, true>)
// `unstored`: the convolution's result is not written, because nothing else reads it.
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_bn_reduce, run_add_relu_backward_reduction<GemmResult::X_NOT_STORED, false>)
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_masked_bn_reduce, run_add_relu_backward_reduction<GemmResult::X_NOT_STORED, true>)
