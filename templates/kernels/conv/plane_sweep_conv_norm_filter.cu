// Filter gradient that sweeps planes (plane_sweep_conv_filter.cuh), whose image is a norm and a (leaky) ReLU of the first
// operand, which the prologue recomputes (plane_sweep_norm.cuh).
//
// Bytes      the activation is neither written nor read.
// GEMM       tile and shared memory are those of plane_sweep_conv_filter.cuh.
// Warps      so are the warps: a producer warpgroup, which also normalises, and two consumers, wgmma.
// Limit      the instructions of the producer: decision 097.
#include "plane_sweep_conv_filter.cuh"
#include "plane_sweep_conv_norm_filter_operands.h"
#include "plane_sweep_norm.cuh"

namespace mbc {

inline const char* backward_filter(const MbcCall& call, const PlaneSweepConvNormFilterOperands& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormFilterArguments>(call);
    return run_plane_sweep_filter(call, a, at.x.as<const T>(), at.dy.as<const T>(), at.dw.as<float>(), at.workspace.as<float>(),
                                  norm_activation(call, at, a));
  });
}

}  // namespace mbc

MBC_LAUNCHER(norm_relu_plane_sweep_conv_backward_filter, backward_filter)
