// Two 1x1 GEMMs in one launch, for the reductions of batch normalization's backward pass: x, recomputed from its image,
// and the data gradient of the convolution that follows. Neither result is written.
//
// The kernel is in conv1x1.cuh: twice M = pixels, N = channels of x, with a K each; a tile of 64 pixels x 128 filters,
// five warpgroups (producer, a consumer for each GEMM, two for the epilogue), wgmma m64n128k16 in bf16 or
// fp16. Limit: bytes, not tensor cores.
//
// Bytes      pixels and weights of both GEMMs, and ReLU's output or bit mask, in; the gradient through ReLU out, and
//            ReLU's output if it is recomputed for other launches.
#include "conv1x1.cuh"
#include "conv1x1_launches.cuh"
#include "dual_conv1x1_operands.h"

MBC_LAUNCHER(dual_conv1x1_add_relu_bn_reduce, run_gradient_relu_reduction<Conv1x1Wgmma, GemmResult::X_AND_GRADIENT, true, false>)
MBC_LAUNCHER(dual_conv1x1_add_relu_bn_reduce_masked, run_gradient_relu_reduction<Conv1x1Wgmma, GemmResult::X_AND_GRADIENT, true, true>)
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
MBC_LAUNCHER(dual_conv1x1_add_relu_remat_bn_reduce_two_grads, run_gradient_add_relu_remat<Conv1x1Wgmma, GemmResult::X_AND_GRADIENT>)
