// Data gradient of 1x1 convolutions in bf16 and fp16: alone, or with the reductions of batch normalization's backward
// pass over the gradient through ReLU in its epilogue.
//
// The kernel is in conv1x1.cuh: M = pixels, N = channels of the image, K = filters; a tile of 64 pixels x 128 channels,
// five warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes,
// not tensor cores.
//
// Bytes      alone: gradient and weights in, the data gradient out. With a reduction also x and ReLU's output or bit
//            mask in, and the gradient through ReLU out instead of the data gradient, which is never stored.
#include "conv1x1_backward_data.cuh"

namespace mbc {

// Accesses: gradient, weights, x, mean, variance, scale and shift if there are any; the gradient, dgamma, dbeta,
// workspace. REMAT: ReLU's output is written after the gradient.
template <bool REMAT>
const char* run_data_normalize_relu_reduction(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const int gradient = affine ? 7 : 5, dgamma = gradient + (REMAT ? 2 : 1);
    const Normalize forward = normalize(call, 3, affine, eps(call, 0));
    const BnReluBackwardReduction<T> sums(sums_of(call, 3, dgamma, eps(call, 1)), forward);
    const Operands<T> x{in<T>(call, 2), nullptr};
    const auto run = [&](const auto& source) {
      return run_conv1x1<GemmResult::GRADIENT>(call, out<T>(call, gradient), source, sums, out<BnBackwardReduction::State>(call, dgamma + 2));
    };
    if constexpr (REMAT)
      return run(RematReluSource<T>(x, out<T>(call, gradient + 1), NormalizeRelu{forward}));
    else
      return run(TensorSource<T, true, false>{x});
  });
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    return run_conv1x1<GemmResult::GRADIENT>(call, out<T>(call, 2), TensorSource<T, false, false>{}, NoReduction{}, nullptr);
  });
}
extern "C" const char* mbc_conv1x1_backward_data_relu_bn_reduce(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, false, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_bn_reduce(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, true, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_bn_reduce_masked(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, true, true>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_bn_relu_bn_reduce(const MbcCall& call) {
  return mbc::run_data_normalize_relu_reduction<false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_bn_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::run_data_normalize_relu_reduction<true>(call);
}
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
extern "C" const char* mbc_conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::GRADIENT>(call);
}
