// Launches of convolutions that sweep planes. LINES: lines of a filter, 3 for volumes, and 1 for the flat sweeps of images and
// of filters of one plane. Each launch has one source for volumes and one for flat sweeps, so that a plan compiles only what it
// launches.
#pragma once

#include "plane_sweep_conv_norm_sums.cuh"
#include "plane_sweep_norm.cuh"

namespace mbc {

// An epilogue that stores half of the filters in a tensor of its own.
template <typename T>
struct StoreHalves {
  static constexpr int TABLE_BYTES = 0;
  T* halves[2];
  int32_t half;  // filters

  template <int UNITS>
  struct Thread {
    const StoreHalves f;
    const int32_t first;

    __device__ Thread(const StoreHalves& f_, char*, int64_t, int32_t filter) : f(f_), first(filter) {}
    // An element at `offset` of the concatenation: 2 half for each voxel before, and `first`.
    __device__ T* target(T*, int64_t offset, int unit) const {
      const int32_t filter = first + unit * 16;
      const int64_t before = (offset - first) / 2;
      return filter < f.half ? f.halves[0] + before + filter : f.halves[1] + before + filter - f.half;
    }
    __device__ void fetch(const StoreHalves&, int64_t, const int32_t (&)[2]) {}
    __device__ void push(const StoreHalves&, const uint32_t (&)[2 * UNITS], int) {}
    __device__ void finish(const StoreHalves&, int64_t, int32_t) const {}
  };
};

// Data gradients, too, with transposed and rotated weights (`backward`).
template <int LINES>
const char* sweep_and_store(const MbcCall& call) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    return run_plane_sweep<LINES>(call, arguments<PlaneSweepConvArguments>(call), out<T>(call, 2), StoreOnly<T>{});
  });
}

// Accesses: gradient of the result, weights, the two slices of the data gradient.
template <int LINES>
const char* sweep_and_store_halves(const MbcCall& call) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepHalvesArguments>(call);
    T *const first = out<T>(call, 2), *const second = out<T>(call, 3);
    const StoreHalves<T> epilogue{{a.swapped ? second : first, a.swapped ? first : second}, narrow(a.filters / 2)};
    return run_plane_sweep<LINES>(call, a, first, epilogue);
  });
}

template <int LINES, typename O>
const char* sweep_with_statistics(const MbcCall& call, const O& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepReductionArguments>(call);
    const StatisticsOfTiles<T> epilogue{{at.workspace, a}};
    if (const char* problem = run_plane_sweep<LINES>(call, a, at.y.template as<T>(), epilogue)) return problem;
    return merge_statistics<T>(call, epilogue.states, a.samples * a.filters, at.mean, at.variance);
  });
}

// Reals: eps of the norm, the slope of the leaky ReLU.
template <int LINES, typename O>
const char* sweep_with_norm_sums(const MbcCall& call, const O& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormArguments>(call);
    const NormSumsOfTiles<T> epilogue{{at.workspace, a}, at.x, normalize(at, eps(call, 0)), real(call, 1)};
    if (const char* problem = run_plane_sweep<LINES>(call, a, at.y.template as<T>(), epilogue)) return problem;
    merge_all_parts(call.stream, epilogue.states.parts(), a.samples * a.filters, epilogue.states.partial,
                    sums_of(at, eps(call, 0)));
    return launched();
  });
}

template <int LINES, typename O>
const char* norm_and_sweep_with_statistics(const MbcCall& call, const O& at) {
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepNormArguments>(call);
    const StatisticsOfTiles<T> epilogue{{at.workspace, a}};
    const char* const problem =
        run_plane_sweep<LINES>(call, a, at.x.template as<const T>(), at.weights.template as<const T>(), at.y.template as<T>(),
                               norm_activation(call, at, a), epilogue);
    if (problem) return problem;
    return merge_statistics<T>(call, epilogue.states, a.samples * a.filters, at.mean2, at.variance2);
  });
}

}  // namespace mbc
