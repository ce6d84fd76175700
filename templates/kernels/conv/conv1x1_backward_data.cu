// Gradient of the image of 1x1 convolutions in bf16 and fp16: alone, and as the prologue of the reductions of batch
// normalisation's backward pass over what ReLU lets through of it.
//
// The kernel is in conv1x1.cuh: M = pixels, N = channels of the image, K = filters; a tile of 64 pixels x 128 filters,
// five warpgroups (producer, two consumers, two that write and reduce), wgmma m64n128k16 in bf16 or fp16. Limit: bytes,
// not tensor cores.
//
// Bytes      the gradient and weights are read; with a reduction also x and what tells ReLU's mask, and the masked
//            gradient is written, so that the gradient before ReLU exists nowhere.
#include "conv1x1_backward_data.cuh"

namespace mbc {

// Accesses: gradient, weights, x, mean, variance, scale and shift if there are; the gradient, dgamma, dbeta, workspace.
// ALONG: behind the gradient ReLU's output is written.
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
      run_conv1x1<GemmResult::GRADIENT>(call, out<T>(call, gradient), source, sums, out<BnBackwardReduction::State>(call, dgamma + 2));
    };
    if constexpr (REMAT)
      run(RematReluSource<T>(x, out<T>(call, gradient + 1), NormalizeRelu{forward}));
    else
      run(TensorSource<T, true, false>{x});
  });
}

}  // namespace mbc

extern "C" const char* mbc_pointwise_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    run_conv1x1<GemmResult::GRADIENT>(call, out<T>(call, 2), TensorSource<T, false, false>{}, NoReduction{}, nullptr);
  });
}
extern "C" const char* mbc_pointwise_data_relu_sums(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, false, false>(call);
}
extern "C" const char* mbc_pointwise_data_relu_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, false, true>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_sums(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, true, false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::GRADIENT, true, true>(call);
}
extern "C" const char* mbc_pointwise_data_normalize_relu_sums(const MbcCall& call) {
  return mbc::run_data_normalize_relu_reduction<false>(call);
}
extern "C" const char* mbc_pointwise_data_normalize_relu_and_sums(const MbcCall& call) {
  return mbc::run_data_normalize_relu_reduction<true>(call);
}
// `_signed`: where a plan has the bit mask of what is recomputed it is not read, since the launch computes it anyway.
extern "C" const char* mbc_pointwise_data_add_relu_and_sums(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::GRADIENT, false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::GRADIENT, false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::GRADIENT, true>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::GRADIENT, true>(call);
}
