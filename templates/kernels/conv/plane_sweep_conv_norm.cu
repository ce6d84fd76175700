// Convolution that sweeps planes (plane_sweep_conv.cuh), whose image is a norm and a (leaky) ReLU of the first operand, which
// the prologue recomputes (plane_sweep_norm.cuh), with the statistics of its result.
//
// Bytes      the activation is neither written nor read.
// GEMM       tile and shared memory are those of plane_sweep_conv.cuh.
// Warps      so are the warps: a producer warpgroup, which also normalises, and two consumers, wgmma.
// Limit      tensor cores: some 70 instructions of a producer thread for each of its 6 to 12 chunks of a plane take less
//            time than the plane's wgmma.
#include "plane_sweep_conv_norm_operands.h"
#include "plane_sweep_conv_statistics.cuh"
#include "plane_sweep_norm.cuh"

namespace mbc {

inline const char* statistics(const MbcCall& call, const PlaneSweepConvNormOperands& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormArguments>(call);
    const StatisticsOfTiles<T> epilogue{{at.workspace.as<void>(), a}};
    const char* const problem = run_plane_sweep(
        call, a, at.x.as<const T>(), at.weights.as<const T>(), at.y.as<T>(), norm_activation(call, at, a), epilogue);
    if (problem) return problem;
    return merge_statistics<T>(call, epilogue.states, a.samples * a.filters, at.mean2, at.variance2);
  });
}

}  // namespace mbc

MBC_LAUNCHER(norm_relu_plane_sweep_conv_statistics, statistics)
