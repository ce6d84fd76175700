// The launch of plane_sweep_conv_halves.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv_halves.cu, but a tile has one line.
// Warps      those of plane_sweep_conv_halves.cu.
// Limit      that of plane_sweep_conv_halves.cu.
#include "plane_sweep_conv_launches.cuh"

extern "C" const char* mbc_plane_sweep_conv_halves_flat(const MbcCall& call) { return mbc::sweep_and_store_halves<1>(call); }
