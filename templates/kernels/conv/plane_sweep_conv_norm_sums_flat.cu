// The launch of plane_sweep_conv_norm_sums.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, warps, shared memory, registers and limit are those of plane_sweep_conv_norm_sums.cu, but a tile has one line.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_sums_flat_operands.h"

MBC_LAUNCHER(plane_sweep_conv_norm_sums_flat, sweep_with_norm_sums<1>)
