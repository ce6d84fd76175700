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
#include "batch_statistics.cuh"

namespace mbc {

// Accesses: image and weights, `operands` operands of the gradient, mean and variance; x if it is written, `outputs`
// further outputs, dgamma, dbeta, workspace.
template <GemmResult M, typename T, typename S>
const char* run_conv1x1_reduction(const MbcCall& call, const S& source, int operands, int outputs) {
  const int mean = 2 + operands, x = mean + 2, dgamma = x + (M == GemmResult::X) + outputs;
  return run_conv1x1<M>(call, M == GemmResult::X ? out<T>(call, x) : nullptr, source,
                        sums_of(call, mean, dgamma, eps(call, 0)), out<BnBackwardReduction::State>(call, dgamma + 2));
}

// Reductions over the gradient through ReLU, by ReLU's output or its bit mask (BITMASK); that gradient is written as
// well. ADD: the gradient is the sum of two. Operands: with ADD, the two gradients, then ReLU's output or mask;
// otherwise ReLU's output and the gradient, or the gradient and the mask.
template <GemmResult M, bool ADD, bool BITMASK>
const char* run_relu_backward_reduction(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int DY = ADD || BITMASK ? 2 : 3, RELU = ADD ? 4 : BITMASK ? 3 : 2, D = 6 + ADD + (M == GemmResult::X);
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    using ReluOperand = std::conditional_t<BITMASK, uint8_t, T>;
    const T* addend = ADD ? in<T>(call, DY + 1) : nullptr;
    const ReluBackwardSource<T, ADD, true, Relu> source{{in<ReluOperand>(call, RELU)}, in<T>(call, DY), addend, nullptr, out<T>(call, D)};
    return run_conv1x1_reduction<M, T>(call, source, 2 + ADD, 1);
  });
}

// Accesses: image, weights, mean, variance, scale and shift if there are any, r, one gradient or two, x, y, d, dgamma,
// dbeta, workspace.
template <bool ADD>
const char* run_add_relu_remat(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const NormalizeAddRelu f{normalize(call, 2, affine, eps(call, 0))};
    const int r = affine ? 6 : 4, x = r + (ADD ? 3 : 2);
    const RematAddReluSource<T, ADD, NormalizeAddRelu> source(in<T>(call, r), in<T>(call, r + 1),
                                                       ADD ? in<T>(call, r + 2) : nullptr, nullptr,
                                                       out<T>(call, x + 2), out<T>(call, x + 1), f);
    const BnBackwardReduction sums = sums_of(call, 2, x + 3, eps(call, 1));
    return run_conv1x1<GemmResult::X>(call, out<T>(call, x), source, RematReduction<NormalizeAddRelu>(sums, f),
                                       out<BnBackwardReduction::State>(call, x + 5));
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
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_conv1x1_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const EpilogueStatistics<T> statistics{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}};
    return run_conv1x1<GemmResult::X>(call, out<T>(call, 2), TensorSource<T, false, false>{}, statistics,
                                       out<typename Statistics<T>::State>(call, 5));
  });
}
extern "C" const char* mbc_conv1x1_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    return run_conv1x1_reduction<GemmResult::X, T>(call, TensorSource<T, true, false>{{nullptr, in<T>(call, 2)}}, 1, 0);
  });
}
extern "C" const char* mbc_conv1x1_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X, false, false>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X, true, false>(call);
}
extern "C" const char* mbc_conv1x1_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X, false, true>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X, true, true>(call);
}
// `unstored`: the convolution's result is not written, because nothing else reads it.
extern "C" const char* mbc_conv1x1_unstored_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X_NOT_STORED, false, false>(call);
}
extern "C" const char* mbc_conv1x1_unstored_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X_NOT_STORED, false, true>(call);
}
extern "C" const char* mbc_conv1x1_unstored_add_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X_NOT_STORED, true, false>(call);
}
extern "C" const char* mbc_conv1x1_unstored_add_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::run_relu_backward_reduction<mbc::GemmResult::X_NOT_STORED, true, true>(call);
}
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::run_add_relu_remat<false>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::run_add_relu_remat<true>(call);
}
