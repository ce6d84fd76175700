// The launches of conv1x1_bn_backward.cu by mma.sync, from compute capability 8.0 on.
//
// GEMM       M = pixels, N = filters, K = channels; of a data gradient, N = channels and K = filters (mma_conv.cuh).
// Tile       128 pixels x 128 or 64 filters, four warps, m16n8k16 in bf16 or fp16, stages of K = 32.
// Bytes      those of conv1x1_bn_backward.cu.
// Limit      bytes, or tensor cores on cards that have few of them for their bandwidth.
#include "conv1x1_mma.cuh"
#include "conv1x1_bn_backward_mma_operands.h"

MBC_LAUNCHER(conv1x1_unstored_bn_backward_mma, run_bn_backward<Conv1x1Mma>)
MBC_LAUNCHER(conv1x1_unstored_bn_relu_backward_mma, run_bn_relu_backward<Conv1x1Mma>)
MBC_LAUNCHER(conv1x1_unstored_bn_relu_bn_reduce_mma, run_bn_relu_reduction<Conv1x1Mma>)
MBC_LAUNCHER(conv1x1_unstored_bn_reduce_mma, run_reduction<Conv1x1Mma, GemmResult::X_NOT_STORED>)
