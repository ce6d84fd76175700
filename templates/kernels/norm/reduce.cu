// Sums over any axes of a tensor of any rank, or of the product of two, times a number; added to the result or not.
//
// Bytes      the operands once, the results once; of sums in parts these, twice.
// Threads    256 a block, of which `lanes` share a sum (lanes.cuh), and blocks of several parts of it; parts are added
//            up by a second launch, all in a fixed order.
// Shared     256 floats.
// Limit      memory bandwidth.
#include "lanes.cuh"

struct ReduceArguments {
  int64_t type;
  int64_t result_type;
  int64_t results;
  int64_t terms;
  int64_t lanes;
  int64_t adjacent;
  int64_t parts;
  int64_t accumulate;
};

namespace mbc {

struct SumOf {
  __device__ float operator()(float a, float, float sum) const { return sum + a; }
};
struct DotOf {
  __device__ float operator()(float a, float b, float sum) const { return fmaf(a, b, sum); }
};

template <typename R>
struct SumOut {
  R* y;
  float factor;
  bool accumulate;

  __device__ void put(int64_t at, float sum) const {
    y[at] = from_float<R>(accumulate ? fmaf(factor, sum, to_float(y[at])) : factor * sum);
  }
};

template <typename T, typename R, typename F>
__global__ void sum_terms(const T* a, const T* b, Reduction sums, int64_t parts, SumOut<R> out, float* partial, F f) {
  __shared__ float shared[THREADS];
  const Lane lane(sums);
  const bool within = lane.result < sums.results;
  const int64_t part = blockIdx.y;
  int64_t place[2] = {0, 0};
  float four[4] = {};
  if (within) {
    sums.left.locate(lane.result, place);
    const int64_t begin = sums.terms / parts * part + min(part, sums.terms % parts);
    const int64_t end = begin + sums.terms / parts + (part < sums.terms % parts ? 1 : 0);
    // Of four short sums: a chain of additions is long, and its rounding error grows with it.
    for (int64_t term = begin + lane.lane; term < end; term += 4 * sums.lanes) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (term + k * sums.lanes >= end) break;
        int64_t at[1];
        sums.reduced.locate(term + k * sums.lanes, at);
        four[k] = f(to_float(a[place[0] + at[0]]), to_float(b[place[0] + at[0]]), four[k]);
      }
    }
  }
  const float sum = lane.combine(shared, (four[0] + four[1]) + (four[2] + four[3]), AddUp{});
  if (!within || lane.lane != 0) return;
  if (partial != nullptr)
    partial[part * sums.results + lane.result] = sum;
  else
    out.put(place[1], sum);
}

template <typename R>
__global__ void sum_parts_of(const float* partial, Reduction sums, int64_t parts, SumOut<R> out) {
  for (int64_t result = thread_index(); result < sums.results; result += thread_count()) {
    float sum = 0.0f;
    for (int64_t part = 0; part < parts; ++part) sum += partial[part * sums.results + result];
    int64_t place[2];
    sums.left.locate(result, place);
    out.put(place[1], sum);
  }
}

template <typename T, typename R, typename F>
void launch_sums(const MbcCall& call, int second, const ReduceArguments& a, const Reduction& sums, F f) {
  const SumOut<R> out{mbc::out<R>(call, second + 1), real(call, 0), a.accumulate != 0};
  float* partial = a.parts > 1 ? static_cast<float*>(call.pointers[second + 2]) : nullptr;
  const dim3 grid(sums.blocks(), static_cast<unsigned>(a.parts));
  MBC_LAUNCH((sum_terms<T, R, F>), grid, THREADS, call.stream, in<T>(call, 0), in<T>(call, second), sums, a.parts, out,
             partial, f);
  if (partial != nullptr)
    MBC_LAUNCH((sum_parts_of<R>), blocks_for(a.results), THREADS, call.stream, partial, sums, a.parts, out);
}

// f of the operands 0 and `second`, added up.
template <typename F>
const char* run_sums(const MbcCall& call, int second, F f) {
  const auto& a = arguments<ReduceArguments>(call);
  const int64_t* more = behind<ReduceArguments>(call);
  const Strided<2> left(more);
  const Strided<1> summed(more);
  const Reduction sums{left, summed, a.results, a.terms, static_cast<int>(a.lanes), a.adjacent != 0};
  MBC_FOR_TYPE(a.type, T, {
    if (a.result_type == a.type)
      launch_sums<T, T>(call, second, a, sums, f);
    else
      launch_sums<T, float>(call, second, a, sums, f);
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_reduce_sum(const MbcCall& call) { return mbc::run_sums(call, 0, mbc::SumOf{}); }
extern "C" const char* mbc_reduce_dot(const MbcCall& call) { return mbc::run_sums(call, 1, mbc::DotOf{}); }
extern "C" const char* mbc_row_reduce_sum(const MbcCall& call) { return mbc::run_sums(call, 0, mbc::SumOf{}); }
extern "C" const char* mbc_row_reduce_dot(const MbcCall& call) { return mbc::run_sums(call, 1, mbc::DotOf{}); }
