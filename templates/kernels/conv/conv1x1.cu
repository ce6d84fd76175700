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
#include "conv1x1_launches.cuh"
#include "conv1x1_operands.h"

extern "C" const char* mbc_conv1x1(const MbcCall& call) {
  return mbc::run_conv1x1<mbc::Conv1x1Wgmma, mbc::GemmResult::X>(call);
}
MBC_LAUNCHER(conv1x1_statistics, run_conv1x1_statistics<Conv1x1Wgmma>)
MBC_LAUNCHER(conv1x1_bn_reduce, run_reduction<Conv1x1Wgmma, GemmResult::X>)
MBC_LAUNCHER(conv1x1_add_relu_backward_bn_reduce, run_add_relu_backward_reduction<Conv1x1Wgmma, GemmResult::X, false>)
MBC_LAUNCHER(conv1x1_add_relu_backward_masked_bn_reduce, run_add_relu_backward_reduction<Conv1x1Wgmma, GemmResult::X, true>)
// `unstored`: the convolution's result is not written, because nothing else reads it.
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_bn_reduce, run_add_relu_backward_reduction<Conv1x1Wgmma, GemmResult::X_NOT_STORED, false>)
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_masked_bn_reduce, run_add_relu_backward_reduction<Conv1x1Wgmma, GemmResult::X_NOT_STORED, true>)
