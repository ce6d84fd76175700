// The launch of plane_sweep_conv_norm.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv_norm.cu, but a tile has one line.
// Warps      those of plane_sweep_conv_norm.cu.
// Limit      that of plane_sweep_conv_norm.cu.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_flat_operands.h"

MBC_LAUNCHER(norm_relu_plane_sweep_conv_statistics_flat, norm_and_sweep_with_statistics<1>)
