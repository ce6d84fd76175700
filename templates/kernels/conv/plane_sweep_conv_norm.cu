// Convolutions that sweep planes, whose image is a norm and a (leaky) ReLU of the first operand, which the prologue
// recomputes (plane_sweep_norm.cuh): forward with the statistics of the result, and the filter gradient.
//
// Bytes      the activation is neither written nor read.
// GEMM       tile and shared memory are those of plane_sweep_conv.cuh and plane_sweep_conv_filter.cuh.
// Warps      so are the warps: a producer warpgroup, which also normalises, and two consumers, wgmma.
// Limit      tensor cores: some 70 instructions of a producer thread for each of its 6 to 12 chunks of a plane take less
//            time than the plane's wgmma.
#include "plane_sweep_conv_filter.cuh"
#include "plane_sweep_conv_norm_operands.h"
#include "plane_sweep_conv_statistics.cuh"
#include "plane_sweep_norm.cuh"

namespace mbc {

// Reals: eps of the norm, the slope of the leaky ReLU.
template <typename Arguments>
NormActivation norm_activation(const MbcCall& call, const PlaneSweepConvNormOperands& at, const Arguments& a) {
  return {normalize(at, eps(call, 0)), real(call, 1), narrow(a.rows / a.samples), narrow(a.channels)};
}

inline const char* statistics(const MbcCall& call, const PlaneSweepConvNormOperands& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormArguments>(call);
    const StatisticsOfTiles<T> epilogue{{at.workspace.as<void>(), a}};
    const char* const problem = run_plane_sweep(
        call, a, at.x.as<const T>(), at.weights.as<const T>(), at.y.as<T>(), norm_activation(call, at, a), epilogue);
    if (problem) return problem;
    merge_all_parts(call.stream, epilogue.states.parts(), a.samples * a.filters, epilogue.states.partial,
                    EpilogueStatistics<T>{{nullptr, 0, at.mean2.as<float>(), at.variance2.as<float>()}});
    return launched();
  });
}

inline const char* backward_filter(const MbcCall& call, const PlaneSweepConvNormOperands& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormFilterArguments>(call);
    return run_plane_sweep_filter(call, a, at.x.as<const T>(), at.dy.as<const T>(), at.dw.as<float>(), at.workspace.as<float>(),
                                  norm_activation(call, at, a));
  });
}

}  // namespace mbc

MBC_LAUNCHER(norm_relu_plane_sweep_conv_statistics, statistics)
MBC_LAUNCHER(norm_relu_plane_sweep_conv_backward_filter, backward_filter)
