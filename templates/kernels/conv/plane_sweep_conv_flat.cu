// The launch of plane_sweep_conv.cu for images, and for volumes with filters of one plane.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv.cuh, with tiles of one line.
// Warps      so are they: a producer warpgroup and two consumers, wgmma.
// Limit      tensor cores.
#include "plane_sweep_conv_launches.cuh"

extern "C" const char* mbc_plane_sweep_conv_flat(const MbcCall& call) { return mbc::sweep_and_store<1>(call); }
