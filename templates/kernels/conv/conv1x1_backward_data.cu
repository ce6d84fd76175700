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
template <bool ALONG>
const char* data_normalize_relu_sums(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const int product = affine ? 7 : 5, dgamma = product + (ALONG ? 2 : 1);
    const Normalize forward = normalize(call, 3, affine, eps(call, 0));
    const ReluSums<T> sums(sums_of(call, 3, dgamma, eps(call, 1)), forward);
    const Operands<T> x{in<T>(call, 2), nullptr};
    const auto run = [&](const auto& source) {
      run_conv1x1<Makes::GRADIENT>(call, out<T>(call, product), source, sums, out<Sums::State>(call, dgamma + 2));
    };
    if constexpr (ALONG)
      run(RematX<T>(x, out<T>(call, product + 1), NormalizeRelu{forward}));
    else
      run(InMemory<T, true, false>{x});
  });
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    run_conv1x1<Makes::GRADIENT>(call, out<T>(call, 2), InMemory<T, false, false>{}, NoReduction{}, nullptr);
  });
}
extern "C" const char* mbc_conv1x1_backward_data_relu_bn_reduce(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::GRADIENT, false, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_relu_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::GRADIENT, false, true>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_bn_reduce(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::GRADIENT, true, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::GRADIENT, true, true>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_bn_relu_bn_reduce(const MbcCall& call) {
  return mbc::data_normalize_relu_sums<false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_bn_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::data_normalize_relu_sums<true>(call);
}
// `_masked`: where a plan has the bit mask of what is recomputed it is not read, since the launch computes it anyway.
extern "C" const char* mbc_conv1x1_backward_data_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::GRADIENT, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_remat_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::GRADIENT, false>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::GRADIENT, true>(call);
}
extern "C" const char* mbc_conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads_masked(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::GRADIENT, true>(call);
}
