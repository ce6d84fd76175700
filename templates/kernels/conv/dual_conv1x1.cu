// Two 1x1 GEMMs in one launch, for the reductions of batch normalisation's backward pass: x, recomputed from its image,
// and the gradient of the image of the convolution behind it. Neither is written.
//
// The kernel is in conv1x1.cuh: twice M = pixels, N = channels of x, with a K each; a tile of 64 pixels x 128 filters,
// five warpgroups (producer, two consumers, one for each GEMM, two that write and reduce), wgmma m64n128k16 in bf16 or
// fp16. Limit: bytes, not tensor cores.
//
// Bytes      both GEMMs' pixels and weights and what tells ReLU's mask are read; the masked gradient is written, and
//            ReLU's output where it is recomputed for others.
#include "conv1x1_backward_data.cuh"

extern "C" const char* mbc_pointwise_pair_relu_sums(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::X_AND_GRADIENT, false, false>(call);
}
extern "C" const char* mbc_pointwise_pair_relu_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::X_AND_GRADIENT, false, true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::X_AND_GRADIENT, true, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_relu_reduction<mbc::GemmResult::X_AND_GRADIENT, true, true>(call);
}
// `_signed`: where a plan has the bit mask of what is recomputed it is not read, since the launch computes it anyway.
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::X_AND_GRADIENT, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::X_AND_GRADIENT, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::X_AND_GRADIENT, true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::run_gradient_add_relu_remat<mbc::GemmResult::X_AND_GRADIENT, true>(call);
}
