// The launch of plane_sweep_conv_norm_sums.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv_norm_sums.cu, but a tile has one line.
// Warps      those of plane_sweep_conv_norm_sums.cu.
// Limit      that of plane_sweep_conv_norm_sums.cu.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_sums_flat_operands.h"

MBC_LAUNCHER(plane_sweep_conv_norm_sums_flat, sweep_with_norm_sums<1>)
