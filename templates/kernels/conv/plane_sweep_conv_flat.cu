// The launch of plane_sweep_conv.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, warps, shared memory, registers and limit are those of plane_sweep_conv.cu, but a tile has one line.
#include "plane_sweep_conv_launches.cuh"

extern "C" const char* mbc_plane_sweep_conv_flat(const MbcCall& call) { return mbc::sweep_and_store<1>(call); }
