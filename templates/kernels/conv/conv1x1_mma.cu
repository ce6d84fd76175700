// The launches of conv1x1.cu by mma.sync, from compute capability 8.0 on.
//
// GEMM       M = pixels, N = filters, K = channels; of a data gradient, N = channels and K = filters (mma_conv.cuh).
// Tile       128 pixels x 128 or 64 filters, four warps, m16n8k16 in bf16 or fp16, stages of K = 32.
// Bytes      those of conv1x1.cu.
// Limit      bytes, or tensor cores on cards that have few of them for their bandwidth.
#include "conv1x1_mma.cuh"
#include "conv1x1_mma_operands.h"

extern "C" const char* mbc_conv1x1_mma(const MbcCall& call) {
  return mbc::run_conv1x1<mbc::Conv1x1Mma, mbc::GemmResult::X>(call);
}
MBC_LAUNCHER(conv1x1_statistics_mma, run_conv1x1_statistics<Conv1x1Mma>)
MBC_LAUNCHER(conv1x1_bn_reduce_mma, run_reduction<Conv1x1Mma, GemmResult::X>)
MBC_LAUNCHER(conv1x1_add_relu_backward_bn_reduce_mma, run_add_relu_backward_reduction<Conv1x1Mma, GemmResult::X, false>)
MBC_LAUNCHER(conv1x1_add_relu_backward_masked_bn_reduce_mma, run_add_relu_backward_reduction<Conv1x1Mma, GemmResult::X, true>)
// `unstored`: the convolution's result is not written, because nothing else reads it.
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_bn_reduce_mma, run_add_relu_backward_reduction<Conv1x1Mma, GemmResult::X_NOT_STORED, false>)
MBC_LAUNCHER(conv1x1_unstored_add_relu_backward_masked_bn_reduce_mma, run_add_relu_backward_reduction<Conv1x1Mma, GemmResult::X_NOT_STORED, true>)
