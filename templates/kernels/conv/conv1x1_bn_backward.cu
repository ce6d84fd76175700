// Backward pass of batch normalization over the result x of a 1x1 convolution: its reductions, and the gradient of x. x
// is recomputed with additions in the same order, and neither read nor written (fused rematerialization).
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      image, weights and the gradient of the normalized x (or of ReLU's output) in; two sums for each channel,
//            or the gradient of x, out.
#include "conv1x1.cuh"
#include "conv1x1_launches.cuh"
#include "conv1x1_bn_backward_operands.h"

MBC_LAUNCHER(conv1x1_unstored_bn_backward, run_bn_backward<Conv1x1Wgmma>)
MBC_LAUNCHER(conv1x1_unstored_bn_relu_backward, run_bn_relu_backward<Conv1x1Wgmma>)
MBC_LAUNCHER(conv1x1_unstored_bn_relu_bn_reduce, run_bn_relu_reduction<Conv1x1Wgmma>)
MBC_LAUNCHER(conv1x1_unstored_bn_reduce, run_reduction<Conv1x1Wgmma, GemmResult::X_NOT_STORED>)
