// The launch of plane_sweep_conv_norm.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, warps, shared memory, registers and limit are those of plane_sweep_conv_norm.cu, but a tile has one line.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_flat_operands.h"

MBC_LAUNCHER(norm_relu_plane_sweep_conv_statistics_flat, norm_and_sweep_with_statistics<1>)
