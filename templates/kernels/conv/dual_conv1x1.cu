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

extern "C" const char* mbc_dual_conv1x1_relu_bn_reduce(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, false, false>(call);
}
extern "C" const char* mbc_dual_conv1x1_relu_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, false, true>(call);
}
extern "C" const char* mbc_dual_conv1x1_add_relu_bn_reduce(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, true, false>(call);
}
extern "C" const char* mbc_dual_conv1x1_add_relu_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, true, true>(call);
}
// `_masked`: where a plan has the bit mask of what is recomputed it is not read, since the launch computes it anyway.
extern "C" const char* mbc_dual_conv1x1_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, false>(call);
}
extern "C" const char* mbc_dual_conv1x1_add_relu_remat_bn_reduce_masked(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, false>(call);
}
extern "C" const char* mbc_dual_conv1x1_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, true>(call);
}
extern "C" const char* mbc_dual_conv1x1_add_relu_remat_bn_reduce_two_grads_masked(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, true>(call);
}
