// Standardized filters: each filter less its mean, over its standard deviation, times a gain; and the gradients of
// filters and gains. A filter is contiguous in either layout. The gradient is in place or not.
//
// Bytes      filters (backward also the gradient) in and out once; a filter is read again (forward twice, backward once)
//            from the cache.
// Threads    256 in a block, `lanes` of which share a filter (lanes.cuh). Sums have a fixed order.
// Shared     256 floats.
// Limit      memory bandwidth; with few large filters the number of blocks.
#include "lanes.cuh"
#include "standardize_arguments.h"
#include "standardize_operands.h"

namespace mbc {

// Constants of a launch: the filters, `gain` (null: there is none) and its factor.
struct Filters {
  const float *w, *gain;
  float factor;

  __device__ float scale(int64_t filter) const { return gain == nullptr ? factor : gain[filter] * factor; }
};

// `each(f)` calls f(offset) for every element of a lane's filter.
template <typename F>
__global__ void each_filter(Reduction filters, F f) {
  __shared__ float shared[THREADS];
  const Lane lane(filters);
  const bool within = lane.result < filters.results;
  f(lane, shared, within, within && lane.lane == 0, [&](auto&& of) {
    for (int64_t term = lane.lane; within && term < filters.terms; term += filters.lanes)
      of(lane.result * filters.terms + term);
  });
}

struct StandardizeFilters {
  Filters filters;
  float *y, *mean, *inverse;
  float elements, eps;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, bool within, bool writes, Each each) const {
    const float* w = filters.w;
    float sum = 0.0f, squares = 0.0f;
    each([&](int64_t at) { sum += w[at]; });
    const float m = lane.combine(shared, sum, AddUp{}) / elements;
    each([&](int64_t at) { squares = fmaf(w[at] - m, w[at] - m, squares); });
    const float i = 1.0f / sqrtf(lane.combine(shared, squares, AddUp{}) / elements + eps);
    const float scale = within ? filters.scale(lane.result) : 0.0f;
    each([&](int64_t at) { y[at] = (w[at] - m) * i * scale; });
    if (writes) mean[lane.result] = m, inverse[lane.result] = i;
  }
};

struct StandardizeFiltersBackward {
  Filters filters;
  const float *dy, *mean, *inverse;
  float *dw, *dgain;
  float elements;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, bool within, bool writes, Each each) const {
    const float* w = filters.w;
    const float m = within ? mean[lane.result] : 0.0f, i = within ? inverse[lane.result] : 0.0f;
    float sum = 0.0f, dot = 0.0f;
    each([&](int64_t at) {
      sum += dy[at];
      dot = fmaf(dy[at], (w[at] - m) * i, dot);
    });
    const float shift = lane.combine(shared, sum, AddUp{}) / elements, total = lane.combine(shared, dot, AddUp{});
    const float slope = total / elements, scale = within ? filters.scale(lane.result) * i : 0.0f;
    each([&](int64_t at) { dw[at] = (dy[at] - shift - (w[at] - m) * i * slope) * scale; });
    if (writes && dgain != nullptr) dgain[lane.result] = total * filters.factor;
  }
};

template <typename F>
const char* run_filters(const MbcCall& call, F f) {
  const auto& a = arguments<StandardizeArguments>(call);
  const Reduction filters{{}, {}, a.filters, a.elements, static_cast<int>(a.lanes), true};
  MBC_LAUNCH((each_filter<F>), filters.blocks(), THREADS, call.stream, filters, f);
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_standardize_filters(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StandardizeArguments>(call);
  const auto at = operands_of_standardize_filters(call);
  const Filters filters{at.w, at.gain, real(call, 1)};
  const auto elements = static_cast<float>(a.elements);
  return run_filters(call, StandardizeFilters{filters, at.y, at.mean, at.inverse, elements, real(call, 0)});
}

extern "C" const char* mbc_standardize_filters_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StandardizeArguments>(call);
  const auto at = operands_of_standardize_filters_backward(call);
  const Filters filters{at.w, at.gain, real(call, 1)};
  return run_filters(call, StandardizeFiltersBackward{filters, at.dy, at.mean, at.inverse, at.dw, at.dgain,
                                                      static_cast<float>(a.elements)});
}
