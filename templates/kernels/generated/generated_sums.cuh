// Generated maps with sums of which the kernel computes further values: the gradient of an operand that was repeated, behind
// functions of that operand (mbc/kernels/cuda/generated).
//
// Bytes      every operand in once, every result out once; with several parts also the parts, twice.
// Kernels    the terms of a sum are adjacent in memory and few: `sum_lines`, 32 to 256 threads share a sum (lanes.cuh).
//            Otherwise the reductions of channel_reduce.cuh. All sums have a fixed order.
// Limit      memory bandwidth.
#pragma once

#include "generated_map.cuh"
#include "lanes.cuh"

namespace mbc {

// One result for each group of lanes; its terms are adjacent vectors of N elements.
template <int N, int SUMS, typename M, typename R>
__global__ void sum_lines(M map, Reduction sums, R r) {
  __shared__ float shared[THREADS];
  const Lane lane(sums);
  const bool within = lane.result < sums.results;
  const auto channel = r.load(within ? lane.result : 0);
  typename R::State state{};
  for (int64_t i = within ? lane.lane : sums.terms; i < sums.terms; i += sums.lanes) {
    const int64_t at = (lane.result * sums.terms + i) * N;
    auto fetched = map.template fetch<N>(at);
    map.template finish<N>(fetched, [&](int) { return channel; }, at);
#pragma unroll
    for (int j = 0; j < N; ++j)
      r.template push<1>(state, channel, {map.template first<N>(fetched, j)}, {map.template second<N>(fetched, j)});
  }
#pragma unroll
  for (int k = 0; k < SUMS; ++k) state.sums[k] = lane.combine(shared, state.sums[k], AddUp{});
  if (within && lane.lane == 0) r.finish(lane.result, r.prior(lane.result), r.total(state));
}

// The image is one of a sum for each channel of each sample.
template <typename F>
const char* run_sums(const MbcCall& call, const GeneratedMap<F>& map, const GeneratedReduction<F>& sums) {
  using T = typename F::Element;
  const auto& a = arguments<GeneratedArguments>(call);
  if (a.layout != MBC_CHANNELS_FIRST || a.parts > 1) return run_generated(call, map, sums);
  by_vectors<WIDTH<T>>(a.inner % WIDTH<T> == 0 && map.vectorizable(), [&](auto n) {
    const int64_t terms = a.inner / n;
    int lanes = 32;
    while (lanes < THREADS && lanes * 4 < terms) lanes *= 2;
    const Reduction lines{{}, {}, a.rows * a.channels, terms, lanes, true};
    MBC_LAUNCH((sum_lines<n, F::SUMS, GeneratedMap<F>, GeneratedReduction<F>>), lines.blocks(), THREADS, call.stream,
               map, lines, sums);
  });
  return launched();
}

}  // namespace mbc
