// The launches of dual_conv1x1.cu by mma.sync, from compute capability 8.0 on.
//
// GEMM       M = pixels, N = filters, K = channels; of a data gradient, N = channels and K = filters (mma_conv.cuh).
// Tile       128 pixels x 128 or 64 filters, four warps, m16n8k16 in bf16 or fp16, stages of K = 32.
// Bytes      those of dual_conv1x1.cu.
// Limit      bytes, or tensor cores on cards that have few of them for their bandwidth.
#include "conv1x1_mma.cuh"
#include "dual_conv1x1_mma_operands.h"

MBC_LAUNCHER(dual_conv1x1_add_relu_bn_reduce_mma, run_gradient_relu_reduction<Conv1x1Mma, GemmResult::X_AND_GRADIENT, true, false>)
MBC_LAUNCHER(dual_conv1x1_add_relu_bn_reduce_masked_mma, run_gradient_relu_reduction<Conv1x1Mma, GemmResult::X_AND_GRADIENT, true, true>)
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
MBC_LAUNCHER(dual_conv1x1_add_relu_remat_bn_reduce_two_grads_mma, run_gradient_add_relu_remat<Conv1x1Mma, GemmResult::X_AND_GRADIENT>)
