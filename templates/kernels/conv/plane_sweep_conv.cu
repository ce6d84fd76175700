// Convolution that sweeps planes (plane_sweep_conv.cuh), forward and data gradient, which stores its result.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv.cuh.
// Warps      a producer warpgroup and two consumers, wgmma.
// Limit      tensor cores.
#include "plane_sweep_conv_launches.cuh"

extern "C" const char* mbc_plane_sweep_conv(const MbcCall& call) { return mbc::sweep_and_store<mbc::SWEEP_TAPS>(call); }
