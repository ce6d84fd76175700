// Convolution that sweeps planes (plane_sweep_conv.cuh), whose image is a norm and a (leaky) ReLU of the first operand, which
// the prologue recomputes (plane_sweep_norm.cuh), with the statistics of its result.
//
// Bytes      the activation is neither written nor read.
// GEMM       tile and shared memory are those of plane_sweep_conv.cuh.
// Warps      a producer warpgroup, which also normalises, and two consumers, wgmma.
// Limit      tensor cores: some 70 instructions of a producer thread for each of its 6 to 12 chunks of a plane take less
//            time than the plane's wgmma.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_operands.h"

MBC_LAUNCHER(norm_relu_plane_sweep_conv_statistics, norm_and_sweep_with_statistics<SWEEP_TAPS>)
