// Convolution that sweeps planes (plane_sweep_conv.cuh) with the statistics of its result in the epilogue, of the batch or of
// each sample.
//
// GEMM       tile, warps and shared memory are those of plane_sweep_conv.cuh.
// Bytes      no pass of its own reads the result.
// Threads    a consumer thread keeps a state for each of its filters while its tile lasts, then a warp merges its threads'
//            states and stores them. A second kernel adds the states of all tiles in order, in fp64.
// Registers  24 at 32 filters; at 64 filters twice as many.
// Limit      that of the convolution; epilogues run while the other warpgroup's wgmma do.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_statistics_operands.h"

MBC_LAUNCHER(plane_sweep_conv_statistics, sweep_with_statistics<SWEEP_TAPS>)
