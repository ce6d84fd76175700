// Filter gradient of convolutions that sweep planes (plane_sweep_conv_filter.cuh).
//
// GEMM       tile, shared memory and registers are those of plane_sweep_conv_filter.cuh.
// Warps      so are they: a producer warpgroup and two consumers, wgmma.
// Limit      tensor cores.
#include "plane_sweep_conv_filter.cuh"

// Accesses: image, gradient of the result, gradient of the filters, workspace.
extern "C" const char* mbc_plane_sweep_conv_backward_filter(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    return run_plane_sweep_filter(call, arguments<PlaneSweepFilterArguments>(call), in<T>(call, 0), in<T>(call, 1),
                                  out<float>(call, 2), out<float>(call, 3), AsStored{});
  });
}
