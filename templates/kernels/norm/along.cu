// Operations along axes of a tensor of any rank: softmax, its logarithm, the largest element, and their gradients; in
// place or not. The elements that are reduced together are a set.
//
// Bytes      the operands and the result once; a set is read again (softmax twice, gradients once) from the cache.
// Threads    256 in a block, `lanes` of which share a set (lanes.cuh). Sums have a fixed order.
// Shared     256 floats.
// Limit      memory bandwidth; with few large sets the number of blocks.
#include <utility>

#include "lanes.cuh"
#include "along_arguments.h"

namespace mbc {

// One lane's share of a set: `each(f)` calls f(offset) for every element of it.
template <typename F>
__global__ void each_axis_set(Reduction sets, F f) {
  __shared__ float shared[THREADS];
  const Lane lane(sets);
  const bool within = lane.result < sets.results;
  int64_t place[2] = {0, 0};
  if (within) sets.left.locate(lane.result, place);
  f(lane, shared, place[1], within && lane.lane == 0, [&](auto&& of) {
    for (int64_t term = lane.lane; within && term < sets.terms; term += sets.lanes) {
      int64_t at[1];
      sets.reduced.locate(term, at);
      of(place[0] + at[0]);
    }
  });
}

// LOG: the logarithms.
template <typename T, bool LOG>
struct AnySoftmax {
  const T* x;
  T* y;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, int64_t, bool, Each each) const {
    float most = -INFINITY, sum = 0.0f;
    each([&](int64_t at) { most = LargerOf{}(to_float(x[at]), most); });
    most = lane.combine(shared, most, LargerOf{});
    each([&](int64_t at) { sum += expf(to_float(x[at]) - most); });
    sum = lane.combine(shared, sum, AddUp{});
    const float log_sum = LOG ? logf(sum) : 0.0f;
    each([&](int64_t at) {
      const float above = to_float(x[at]) - most;
      y[at] = from_float<T>(LOG ? above - log_sum : expf(above) / sum);
    });
  }
};
template <typename T>
using SoftmaxOf = AnySoftmax<T, false>;
template <typename T>
using LogSoftmaxOf = AnySoftmax<T, true>;

template <typename T>
struct SoftmaxBackward {
  const T *y, *dy;
  T* dx;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, int64_t, bool, Each each) const {
    float dot = 0.0f;
    each([&](int64_t at) { dot = fmaf(to_float(y[at]), to_float(dy[at]), dot); });
    dot = lane.combine(shared, dot, AddUp{});
    each([&](int64_t at) { dx[at] = from_float<T>(to_float(y[at]) * (to_float(dy[at]) - dot)); });
  }
};

template <typename T>
struct LogSoftmaxBackward {
  const T *y, *dy;
  T* dx;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, int64_t, bool, Each each) const {
    float total = 0.0f;
    each([&](int64_t at) { total += to_float(dy[at]); });
    total = lane.combine(shared, total, AddUp{});
    each([&](int64_t at) { dx[at] = from_float<T>(to_float(dy[at]) - expf(to_float(y[at])) * total); });
  }
};

template <typename T>
struct LargestOf {
  const T* x;
  T* y;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, int64_t left, bool writes, Each each) const {
    float most = -INFINITY;
    each([&](int64_t at) { most = LargerOf{}(to_float(x[at]), most); });
    most = lane.combine(shared, most, LargerOf{});
    if (writes) y[left] = from_float<T>(most);
  }
};

template <typename T>
struct LargestBackward {
  const T *x, *y, *dy;
  T* dx;

  template <typename Each>
  __device__ void operator()(const Lane& lane, float* shared, int64_t left, bool, Each each) const {
    const float most = to_float(y[left]);
    float count = 0.0f;
    each([&](int64_t at) { count += to_float(x[at]) == most ? 1.0f : 0.0f; });
    count = lane.combine(shared, count, AddUp{});
    const float share = count > 0.0f ? to_float(dy[left]) / count : 0.0f;
    each([&](int64_t at) { dx[at] = from_float<T>(to_float(x[at]) == most ? share : 0.0f); });
  }
};

// F: the functor of a type, whose members are the inputs, INPUTS in number, and the output.
template <template <typename> typename F, size_t... INPUTS>
const char* run_along(const MbcCall& call, std::index_sequence<INPUTS...>) {
  const auto& a = arguments<AlongArguments>(call);
  const int64_t* more = behind<AlongArguments>(call);
  const Strided<2> left(more);
  const Strided<1> reduced(more);
  const Reduction sets{left, reduced, a.results, a.terms, static_cast<int>(a.lanes), a.adjacent != 0};
  MBC_FOR_TYPE(a.type, T, {
    const F<T> f{in<T>(call, INPUTS)..., out<T>(call, sizeof...(INPUTS))};
    MBC_LAUNCH((each_axis_set<F<T>>), sets.blocks(), THREADS, call.stream, sets, f);
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_softmax(const MbcCall& call) {
  return mbc::run_along<mbc::SoftmaxOf>(call, std::make_index_sequence<1>{});
}
extern "C" const char* mbc_softmax_backward(const MbcCall& call) {
  return mbc::run_along<mbc::SoftmaxBackward>(call, std::make_index_sequence<2>{});
}
extern "C" const char* mbc_log_softmax(const MbcCall& call) {
  return mbc::run_along<mbc::LogSoftmaxOf>(call, std::make_index_sequence<1>{});
}
extern "C" const char* mbc_log_softmax_backward(const MbcCall& call) {
  return mbc::run_along<mbc::LogSoftmaxBackward>(call, std::make_index_sequence<2>{});
}
extern "C" const char* mbc_amax(const MbcCall& call) {
  return mbc::run_along<mbc::LargestOf>(call, std::make_index_sequence<1>{});
}
extern "C" const char* mbc_amax_backward(const MbcCall& call) {
  return mbc::run_along<mbc::LargestBackward>(call, std::make_index_sequence<3>{});
}
