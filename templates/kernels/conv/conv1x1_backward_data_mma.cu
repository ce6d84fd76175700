// The launches of conv1x1_backward_data.cu by mma.sync, from compute capability 8.0 on.
//
// GEMM       M = pixels, N = filters, K = channels; of a data gradient, N = channels and K = filters (mma_conv.cuh).
// Tile       128 pixels x 128 or 64 filters, four warps, m16n8k16 in bf16 or fp16, stages of K = 32.
// Bytes      those of conv1x1_backward_data.cu.
// Limit      bytes, or tensor cores on cards that have few of them for their bandwidth.
#include "conv1x1_mma.cuh"
#include "conv1x1_backward_data_mma_operands.h"

extern "C" const char* mbc_conv1x1_backward_data_mma(const MbcCall& call) {
  return mbc::run_conv1x1<mbc::Conv1x1Mma, mbc::GemmResult::GRADIENT>(call);
}
MBC_LAUNCHER(conv1x1_backward_data_relu_bn_reduce_mma, run_gradient_relu_reduction<Conv1x1Mma, GemmResult::GRADIENT, false, false>)
MBC_LAUNCHER(conv1x1_backward_data_add_relu_bn_reduce_mma, run_gradient_relu_reduction<Conv1x1Mma, GemmResult::GRADIENT, true, false>)
MBC_LAUNCHER(conv1x1_backward_data_add_relu_bn_reduce_masked_mma, run_gradient_relu_reduction<Conv1x1Mma, GemmResult::GRADIENT, true, true>)
MBC_LAUNCHER(conv1x1_backward_data_bn_relu_bn_reduce_mma, run_gradient_bn_relu_reduction<Conv1x1Mma>)
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
MBC_LAUNCHER(conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads_mma, run_gradient_add_relu_remat<Conv1x1Mma, GemmResult::GRADIENT>)
