// Sums over any axes of a tensor of any rank, or of the product of two, times a number; added to the result or not.
//
// Bytes      the operands once, the results once; with several parts also the parts, twice.
// Kernels    the terms are adjacent in memory: `sum_along`, `lanes` adjacent threads share a sum (lanes.cuh). Otherwise
//            results are adjacent: `sum_down`, a block has a tile of vectors of results and deals out their rows to its
//            lanes, as many in flight as registers hold:
//
//               rows 0, lanes, ..         thread 0          thread 1          .. thread tile - 1
//               rows 1, lanes + 1, ..     thread tile       thread tile + 1   ..
//
//            Blocks of several parts of a sum write them to the workspace; a second launch adds them. All sums have a
//            fixed order.
// Threads    256 in a block, 16 bytes at a time if the innermost axis allows it.
// Shared     a float for each result that a thread sums.
// Limit      memory bandwidth.
#include "channel_reduce.cuh"
#include "lanes.cuh"
#include "reduce_arguments.h"
#include "reduce_operands.h"

namespace mbc {

constexpr int SUM_BLOCKS = 4;  // resident

struct SumOf {
  static constexpr int OPERANDS = 1;
  __device__ float operator()(float a, float, float sum) const { return sum + a; }
};
struct DotOf {
  static constexpr int OPERANDS = 2;
  __device__ float operator()(float a, float b, float sum) const { return fmaf(a, b, sum); }
};

// A thread's loads in flight: all are issued before any is added. Elements beyond the end are zero.
template <typename T, int N, typename F>
struct Terms {
  static constexpr int K = 4 / F::OPERANDS;
  Held<T, N> a[K] = {}, b[K] = {};

  // From `begin` on, `step` apart.
  __device__ Terms(const T* x, const T* z, const Strided<1>& reduced, int64_t place, int64_t begin, int64_t end, int step) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int64_t term = begin + int64_t{k} * step;
      if (term >= end) continue;
      int64_t at[1];
      reduced.locate(term, at);
      a[k] = hold<N>(x + place + at[0]);
      if constexpr (F::OPERANDS == 2) b[k] = hold<N>(z + place + at[0]);
    }
  }
  __device__ float add(const F& f, int k, int j, float sum) const { return f(to_float(a[k][j]), to_float(b[k][j]), sum); }
};

// Results, in fp32 or in the type of the operands.
template <typename T>
struct SumOut {
  void* y;
  float factor;
  bool fp32, accumulate, wide;

  template <typename R>
  __device__ void write(R* at, float sum) const {
    *at = from_float<R>(accumulate ? fmaf(factor, sum, to_float(*at)) : factor * sum);
  }
  __device__ void put(int64_t at, float sum) const {
    if (fp32)
      write(static_cast<float*>(y) + at, sum);
    else
      write(static_cast<T*>(y) + at, sum);
  }
  template <typename R, int N>
  __device__ void write_all(R* at, float (&sum)[N]) const {
    constexpr int AT_ONCE = N < WIDTH<R> ? N : WIDTH<R>;
#pragma unroll
    for (int j = 0; j < N; j += AT_ONCE) {
      float some[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) some[i] = factor * sum[j + i];
      store_floats(at + j, some);
    }
  }
  // N results, `step` apart.
  template <int N>
  __device__ void put_all(int64_t at, int64_t step, float (&sum)[N]) const {
    if (!wide) {
#pragma unroll
      for (int j = 0; j < N; ++j) put(at + j * step, sum[j]);
    } else if (fp32) {
      write_all(static_cast<float*>(y) + at, sum);
    } else {
      write_all(static_cast<T*>(y) + at, sum);
    }
  }
};

// The sum of the parts, as a reduction for channel_reduce.cuh.
template <typename T>
struct SumOfParts {
  using State = float;
  using Total = double;
  struct Prior {};
  Strided<2> left;
  SumOut<T> out;

  __device__ double total(float part) const { return part; }
  __device__ void add(double& into, double from) const { into += from; }
  __device__ Prior prior(int64_t) const { return {}; }
  __device__ void finish(int64_t result, Prior, double total) const {
    int64_t place[2];
    left.locate(result, place);
    out.put(place[1], static_cast<float>(total));
  }
};

// The terms are adjacent, and are read as vectors.
template <typename T, int N, typename F>
__global__ void __launch_bounds__(THREADS, SUM_BLOCKS)
    sum_along(const T* a, const T* b, Reduction sums, SumOut<T> out, float* partial, F f) {
  __shared__ float shared[THREADS];
  wait_for_prior_grid();
  launch_dependents();
  const Lane lane(sums);
  const bool within = lane.result < sums.results;
  int64_t place[2] = {0, 0};
  constexpr int K = Terms<T, N, F>::K;
  float rows[K] = {};  // a chain of additions is long, and its rounding error grows with it
  if (within) {
    sums.left.locate(lane.result, place);
    const PartRange range(sums.terms);
    for (int64_t term = range.begin + lane.lane; term < range.end; term += int64_t{K} * sums.lanes) {
      const Terms<T, N, F> terms(a, b, sums.reduced, place[0], term, range.end, sums.lanes);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) sum = terms.add(f, k, j, sum);
        rows[k] += sum;
      }
    }
  }
#pragma unroll
  for (int k = 1; k < K; ++k) rows[0] += rows[k];
  const float sum = lane.combine(shared, rows[0], AddUp{});
  if (!within || lane.lane != 0) return;
  if (partial != nullptr)
    partial[blockIdx.y * sums.results + lane.result] = sum;
  else
    out.put(place[1], sum);
}

// Results are adjacent: a thread sums a vector of them.
template <typename T, int N, typename F>
__global__ void __launch_bounds__(THREADS, SUM_BLOCKS)
    sum_down(const T* a, const T* b, Reduction sums, int tile, SumOut<T> out, float* partial, F f) {
  __shared__ Vec<float, N> shared[THREADS];
  wait_for_prior_grid();
  launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) / tile, own = static_cast<int>(threadIdx.x) - lane * tile;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tile * N, result = first + own * N;
  const bool within = lane < sums.lanes && result < sums.results;
  constexpr int K = Terms<T, N, F>::K;
  int64_t place[2] = {0, 0};
  float sum[N] = {};
  if (within) {
    sums.left.locate(result, place);
    const PartRange range(sums.terms);
    for (int64_t term = range.begin + lane; term < range.end; term += int64_t{K} * sums.lanes) {
      const Terms<T, N, F> terms(a, b, sums.reduced, place[0], term, range.end, sums.lanes);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float rows = 0.0f;
#pragma unroll
        for (int k = 0; k < K; ++k) rows = terms.add(f, k, j, rows);
        sum[j] += rows;
      }
    }
  }
  if (sums.lanes == 1 && partial == nullptr) {
    if (within) out.put_all(place[1], sums.left.axes == 0 ? 0 : sums.left.stride[1][sums.left.axes - 1], sum);
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) shared[threadIdx.x].v[j] = sum[j];
  __syncthreads();
  const float* lanes = shared[0].v;
  for (int i = static_cast<int>(threadIdx.x); i < tile * N && first + i < sums.results; i += THREADS) {
    float total = 0.0f;
    for (int k = 0; k < sums.lanes; ++k) total += lanes[k * tile * N + i];
    if (partial != nullptr) {
      partial[blockIdx.y * sums.results + first + i] = total;
    } else {
      sums.left.locate(first + i, place);
      out.put(place[1], total);
    }
  }
}

template <typename T, int N, typename F>
void launch_sums(const MbcCall& call, const ReduceOperands& at, const ReduceArguments& a, Reduction sums, F f) {
  const T *x = at.x, *z = at.z;
  void* y = at.y;
  const bool wide = sums.left.vectorizable(N) && sums.left.adjacent(1) && aligned(y, 16) && a.accumulate == 0;
  const SumOut<T> out{y, real(call, 0), a.result_type == MBC_FP32, a.accumulate != 0, wide};
  float* partial = a.parts > 1 ? at.workspace.as<float>() : nullptr;
  if (sums.adjacent) {
    sums.reduced.take_vectors(N);
    sums.terms /= N;
    const dim3 grid(sums.blocks(), static_cast<unsigned>(a.parts));
    MBC_LAUNCH((sum_along<T, N, F>), grid, THREADS, call.stream, x, z, sums, out, partial, f);
  } else {
    const int tile = static_cast<int>(a.tile);
    const dim3 grid(static_cast<unsigned>(divide_up(a.results, a.tile * N)), static_cast<unsigned>(a.parts));
    MBC_LAUNCH((sum_down<T, N, F>), grid, THREADS, call.stream, x, z, sums, tile, out, partial, f);
  }
  if (partial != nullptr) merge_all_parts(call.stream, a.parts, a.results, partial, SumOfParts<T>{sums.left, out});
}

// Sums f of x and z; without z, of x alone.
template <typename F>
const char* run_sums(const MbcCall& call, ReduceOperands at, F f) {
  if (at.z.pointer == nullptr) at.z = at.x;
  const auto& a = arguments<ReduceArguments>(call);
  const int64_t* more = behind<ReduceArguments>(call);
  const Strided<2> left(more);
  const Strided<1> summed(more);
  const Reduction sums{left, summed, a.results, a.terms, static_cast<int>(a.lanes), a.tile == 0};
  MBC_FOR_TYPE(a.type, T, {
    by_vectors<WIDTH<T>>(a.vector == WIDTH<T> && aligned(at.x, 16) && aligned(at.z, 16),
                         [&](auto n) { launch_sums<T, n>(call, at, a, sums, f); });
  });
  return launched();
}

}  // namespace mbc

// Sums over rows, `row_reduce_sum` and `row_reduce_dot`, use these launchers, too: their axes are extents and strides.
extern "C" const char* mbc_reduce_sum(const MbcCall& call) {
  return mbc::run_sums(call, mbc::operands_of_reduce_sum(call), mbc::SumOf{});
}
extern "C" const char* mbc_reduce_dot(const MbcCall& call) {
  return mbc::run_sums(call, mbc::operands_of_reduce_dot(call), mbc::DotOf{});
}
