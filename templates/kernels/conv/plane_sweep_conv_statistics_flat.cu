// The launch of plane_sweep_conv_statistics.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv_statistics.cu, but a tile has one line.
// Warps      those of plane_sweep_conv_statistics.cu.
// Limit      that of plane_sweep_conv_statistics.cu.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_statistics_flat_operands.h"

MBC_LAUNCHER(plane_sweep_conv_statistics_flat, sweep_with_statistics<1>)
