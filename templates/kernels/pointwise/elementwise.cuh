// Maps of one or two tensors, element by element, which are instantiated with functors. The layout does not matter, and
// input and output may be the same bytes: each thread reads its elements before it writes them.
#pragma once

#include "activations.cuh"
#include "elementwise_arguments.h"

namespace mbc {

template <typename T, typename F>
__global__ void map_one(const T* x, T* y, int64_t vectors, int64_t elements, F f) {
  constexpr int N = WIDTH<T>;
  const int64_t stride = thread_count();
  int64_t i = thread_index();
  // A thread has two vectors in flight; both are read before either is written.
  for (; i + stride < vectors; i += 2 * stride) {
    Vec<T, N> a = load<N>(x + i * N), b = load<N>(x + (i + stride) * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a.v[j] = from_float<T>(f(to_float(a.v[j])));
      b.v[j] = from_float<T>(f(to_float(b.v[j])));
    }
    store(y + i * N, a);
    store(y + (i + stride) * N, b);
  }
  if (i < vectors) {
    Vec<T, N> a = load<N>(x + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) a.v[j] = from_float<T>(f(to_float(a.v[j])));
    store(y + i * N, a);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride) y[e] = from_float<T>(f(to_float(x[e])));
}

template <typename T, typename F>
__global__ void map_two(const T* x, const T* z, T* y, int64_t vectors, int64_t elements, F f) {
  constexpr int N = WIDTH<T>;
  const int64_t stride = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    Vec<T, N> a = load<N>(x + i * N);
    const Vec<T, N> b = load<N>(z + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) a.v[j] = from_float<T>(f(to_float(a.v[j]), to_float(b.v[j])));
    store(y + i * N, a);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride)
    y[e] = from_float<T>(f(to_float(x[e]), to_float(z[e])));
}

template <typename F>
const char* run_one(const MbcCall& call, F f) {
  const auto& a = arguments<MapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 1);
    const int64_t vectors = aligned(x, 16) && aligned(y, 16) ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((map_one<T, F>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, x, y, vectors,
               a.elements, f);
  });
  return launched();
}

template <typename F>
const char* run_two(const MbcCall& call, F f) {
  const auto& a = arguments<MapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T *x = in<T>(call, 0), *z = in<T>(call, 1);
    T* y = out<T>(call, 2);
    const int64_t vectors = aligned(x, 16) && aligned(z, 16) && aligned(y, 16) ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((map_two<T, F>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, x, z, y, vectors,
               a.elements, f);
  });
  return launched();
}

}  // namespace mbc
