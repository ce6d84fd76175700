// Data gradient that sweeps planes (plane_sweep_conv.cuh) with the sums of the gradient of the norm before it in the epilogue,
// over the batch or over each sample.
//
// GEMM       tile and warps are those of plane_sweep_conv.cuh.
// Bytes      the sums read the norm's input, but not the result.
// Threads    a consumer thread keeps sums for each of its filters while its tile lasts, then a warp adds its threads' sums
//            and stores them. A second kernel adds the sums of all tiles in order, in fp64.
// Shared     that of plane_sweep_conv.cuh, and the constants of the norm's channels for each warp.
// Registers  16 at 32 filters, and 16 of x; at 64 filters twice as many.
// Limit      that of the convolution; epilogues run while the other warpgroup's wgmma do.
#include "plane_sweep_conv_launches.cuh"
#include "plane_sweep_conv_norm_sums_operands.h"

MBC_LAUNCHER(plane_sweep_conv_norm_sums, sweep_with_norm_sums<SWEEP_TAPS>)
