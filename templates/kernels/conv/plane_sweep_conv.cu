// Convolution that sweeps planes (plane_sweep_conv.cuh), forward and data gradient, which stores its result.
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv.cuh.
// Warps      so are they: a producer warpgroup and two consumers, wgmma.
// Limit      tensor cores.
#include "plane_sweep_conv.cuh"

// Data gradients, too, with transposed and rotated weights (`backward`).
extern "C" const char* mbc_plane_sweep_conv(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepConvArguments>(call);
    return run_plane_sweep(call, a, out<T>(call, 2), StoreOnly<T>{});
  });
}
