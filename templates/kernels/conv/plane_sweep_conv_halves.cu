// Data gradient that sweeps planes (plane_sweep_conv.cuh), of a concatenation of two equal halves: in two tensors.
//
// GEMM       tile, warps, shared memory and registers are those of plane_sweep_conv.cuh.
// Threads    a consumer thread stores four neighbouring filters of a voxel, which lie in one half.
// Limit      tensor cores.
#include "plane_sweep_conv_launches.cuh"

extern "C" const char* mbc_plane_sweep_conv_halves(const MbcCall& call) { return mbc::sweep_and_store_halves<mbc::SWEEP_TAPS>(call); }
