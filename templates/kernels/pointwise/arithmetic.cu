// Sums, differences, products and quotients of two tensors of any rank, either of which may be repeated along axes of
// the result (broadcasting), in place or not; also a tensor that is repeated along axes, times a number: the gradient
// of a sum or mean.
//
// Bytes      the operands and the result once; a repeated operand is read from the cache.
// Threads    256 in a grid-stride loop over the result, 16 bytes at a time if the innermost axis allows it, or if the
//            operands that are not repeated along it are contiguous; one multiplication for each axis finds an
//            element's position in an operand (strided.cuh).
// Limit      memory bandwidth; with many axes and no vectors index arithmetic.
#include "broadcast.cuh"
#include "arithmetic_arguments.h"

namespace mbc {

struct Plus {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Minus {
  __device__ float operator()(float a, float b) const { return a - b; }
};
struct Times {
  __device__ float operator()(float a, float b) const { return a * b; }
};
struct Over {
  __device__ float operator()(float a, float b) const { return a / b; }
};

struct Prelu {
  __device__ float operator()(float a, float b) const { return a > 0.0f ? a : a * b; }
};
struct PreluSlope {
  __device__ float operator()(float a, float b) const { return a > 0.0f ? 1.0f : b; }
};
template <typename T, int N>
__global__ void map_expand(const T* x, T* y, int64_t vectors, Strided<1> places, bool across, float factor) {
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    int64_t at[1];
    places.locate(i * N, at);
    Vec<T, N> v = load_places<N>(x, places, 0, i * N, at[0], across);
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(factor * to_float(v.v[j]));
    store(y + i * N, v);
  }
}

}  // namespace mbc

extern "C" const char* mbc_broadcast(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ArithmeticArguments>(call);
  const int64_t* more = behind<ArithmeticArguments>(call);
  const Strided<2> places(more);
  MBC_FOR_TYPE(a.type, T, {
    switch (a.operation) {
      case 0: run_broadcast<T>(call, a.elements, places, Plus{}); break;
      case 1: run_broadcast<T>(call, a.elements, places, Minus{}); break;
      case 2: run_broadcast<T>(call, a.elements, places, Times{}); break;
      case 3: run_broadcast<T>(call, a.elements, places, Over{}); break;
      case 4: run_broadcast<T>(call, a.elements, places, Reversed<Minus>{}); break;
      case 5: run_broadcast<T>(call, a.elements, places, Reversed<Over>{}); break;
      case 6: run_broadcast<T>(call, a.elements, places, Prelu{}); break;
      case 7: run_broadcast<T>(call, a.elements, places, PreluSlope{}); break;
      default: return "there is no such operator";
    }
  });
  return launched();
}

extern "C" const char* mbc_expand(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ExpandArguments>(call);
  const int64_t* more = behind<ExpandArguments>(call);
  const Strided<1> places(more);
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 1);
    constexpr int N = WIDTH<T>;
    if (reads_vectors<T>(call, places))
      MBC_LAUNCH((map_expand<T, N>), blocks_for(a.elements / N), THREADS, call.stream, x, y, a.elements / N, places,
                 !places.vectorizable(N), real(call, 0));
    else
      MBC_LAUNCH((map_expand<T, 1>), blocks_for(a.elements), THREADS, call.stream, x, y, a.elements, places, false,
                 real(call, 0));
  });
  return launched();
}
