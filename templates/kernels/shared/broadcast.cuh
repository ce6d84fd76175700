// Two tensors of any rank, either of which may be repeated along axes of the result (broadcasting), in place or not:
// the common part of operators, which differ in the function of two elements.
#pragma once

#include "strided.cuh"
#include "arithmetic_arguments.h"

namespace mbc {

template <typename F>
struct Reversed {
  F f;
  __device__ float operator()(float a, float b) const { return f(b, a); }
};

// An operand and the result may be the same bytes: the thread that writes an element is the one that reads its
// operands.
template <typename T, int N, typename F>
__global__ void map_broadcast(const T* a, const T* b, T* y, int64_t vectors, Strided<2> places, bool across, F f) {
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    int64_t at[2];
    places.locate(i * N, at);
    Vec<T, N> u = load_places<N>(a, places, 0, i * N, at[0], across);
    const Vec<T, N> v = load_places<N>(b, places, 1, i * N, at[1], across);
#pragma unroll
    for (int j = 0; j < N; ++j) u.v[j] = from_float<T>(f(to_float(u.v[j]), to_float(v.v[j])));
    store(y + i * N, u);
  }
}

template <typename T, int OPERANDS>
bool reads_vectors(const MbcCall& call, const Strided<OPERANDS>& places) {
  constexpr int N = WIDTH<T>;
  return unaligned(call) == nullptr && (places.vectorizable(N) || places.vectorizable_across_lines(N));
}

template <typename T, int N, typename F>
void launch_broadcast(const MbcCall& call, int64_t elements, const Strided<2>& places, F f) {
  const int64_t vectors = elements / N;
  MBC_LAUNCH((map_broadcast<T, N, F>), blocks_for(vectors), THREADS, call.stream, in<T>(call, 0), in<T>(call, 1),
             out<T>(call, 2), vectors, places, !places.vectorizable(N), f);
}

template <typename T, typename F>
void run_broadcast(const MbcCall& call, int64_t elements, const Strided<2>& places, F f) {
  if (reads_vectors<T>(call, places))
    launch_broadcast<T, WIDTH<T>>(call, elements, places, f);
  else
    launch_broadcast<T, 1>(call, elements, places, f);
}

}  // namespace mbc
