// Data gradient of 1x1 convolutions in bf16 and fp16: alone, or with the reductions of batch normalization's backward
// pass over the gradient through ReLU in its epilogue.
//
// The kernel is in conv1x1.cuh: M = pixels, N = channels of the image, K = filters; a tile of 64 pixels x 128 channels,
// five warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes,
// not tensor cores.
//
// Bytes      alone: gradient and weights in, the data gradient out. With a reduction also x and ReLU's output or bit
//            mask in, and the gradient through ReLU out instead of the data gradient, which is never stored.
#include "conv1x1.cuh"
#include "conv1x1_launches.cuh"
#include "conv1x1_backward_data_operands.h"

extern "C" const char* mbc_conv1x1_backward_data(const MbcCall& call) {
  return mbc::run_conv1x1<mbc::Conv1x1Wgmma, mbc::GemmResult::GRADIENT>(call);
}
MBC_LAUNCHER(conv1x1_backward_data_relu_bn_reduce, run_gradient_relu_reduction<Conv1x1Wgmma, GemmResult::GRADIENT, false, false>)
MBC_LAUNCHER(conv1x1_backward_data_add_relu_bn_reduce, run_gradient_relu_reduction<Conv1x1Wgmma, GemmResult::GRADIENT, true, false>)
MBC_LAUNCHER(conv1x1_backward_data_add_relu_bn_reduce_masked, run_gradient_relu_reduction<Conv1x1Wgmma, GemmResult::GRADIENT, true, true>)
MBC_LAUNCHER(conv1x1_backward_data_bn_relu_bn_reduce, run_gradient_bn_relu_reduction<Conv1x1Wgmma>)
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
MBC_LAUNCHER(conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads, run_gradient_add_relu_remat<Conv1x1Wgmma, GemmResult::GRADIENT>)
