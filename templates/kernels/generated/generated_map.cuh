// Loops of generated maps: every result is a function of one element of each operand (mbc/kernels/cuda/generated).
//
// Bytes      every operand in once, every result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop; a map of one operand has two vectors in flight. With constants of channels the
//            maps of channels.cuh.
// Limit      memory bandwidth.
//
// Results may take the place of operands of their shape: each thread reads its elements before it writes them.
#pragma once

#include "activations.cuh"
#include "channels.cuh"
#include "generated_map_arguments.h"
#include "strided.cuh"

namespace mbc {

// F, which is generated, has
//   Element                    the type of operands and results
//   WHOLE, REPEATED, RESULTS   numbers of operands of the results' shape, of operands that are repeated along axes of
//                              the results, and of results
//   Channel, load(c)           constants of a channel, a struct of floats
//   operator()(channel, x, y)  computes y, an element of each result, from x, an element of each operand
template <typename F>
struct GeneratedMap {
  using Element = typename F::Element;
  using Channel = typename F::Channel;
  static constexpr int WHOLE = F::WHOLE, OPERANDS = WHOLE + F::REPEATED, RESULTS = F::RESULTS;
  template <int>
  static constexpr int NEIGHBOURS = 1;

  const Element* in[OPERANDS];
  Element* out[RESULTS];
  F f;

  template <int N>
  struct Fetched {
    Held<Element, N> x[WHOLE > 0 ? WHOLE : 1];
    __device__ float operator()(int k, int j) const { return to_float(x[k][j]); }
  };

  bool vectorizable() const {
    bool all = true;
    for (const Element* x : in) all = all && aligned(x, 16);
    for (const Element* y : out) all = all && aligned(y, 16);
    return all;
  }
  __device__ Channel load(int64_t c) const { return f.load(c); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> fetched;
#pragma unroll
    for (int k = 0; k < WHOLE; ++k) fetched.x[k] = hold<N>(in[k] + at);
    return fetched;
  }
  // element(k, j): the j-th element of operand k.
  template <int N, typename Element_, typename Of>
  __device__ void finish(const Element_& element, const Of& of, int64_t at, int64_t = 0, int64_t = 0) const {
    float result[RESULTS][N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[OPERANDS], y[RESULTS];
#pragma unroll
      for (int k = 0; k < OPERANDS; ++k) x[k] = element(k, j);
      f(of(j), x, y);
#pragma unroll
      for (int k = 0; k < RESULTS; ++k) result[k][j] = y[k];
    }
#pragma unroll
    for (int k = 0; k < RESULTS; ++k) store_floats(out[k] + at, result[k]);
  }
};

struct NoChannel {};

template <int N, typename M>
__global__ void map_elements(M map, int64_t vectors, int64_t elements) {
  constexpr int K = M::OPERANDS == 1 ? 2 : 1;  // vectors in flight; all are read before one is written
  const auto of = [](int) { return typename M::Channel{}; };
  const int64_t stride = thread_count();
  int64_t i = thread_index();
  for (; i + (K - 1) * stride < vectors; i += K * stride) {
    typename M::template Fetched<N> fetched[K];
#pragma unroll
    for (int k = 0; k < K; ++k) fetched[k] = map.template fetch<N>((i + k * stride) * N);
#pragma unroll
    for (int k = 0; k < K; ++k) map.template finish<N>(fetched[k], of, (i + k * stride) * N);
  }
  if (i < vectors) map.template finish<N>(map.template fetch<N>(i * N), of, i * N);
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride)
    map.template finish<1>(map.template fetch<1>(e), of, e);
}

template <int N, typename M, int REPEATED>
__global__ void map_repeated(M map, int64_t vectors, Strided<REPEATED> places, bool across) {
  const auto of = [](int) { return typename M::Channel{}; };
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    int64_t at[REPEATED];
    places.locate(i * N, at);
    const auto whole = map.template fetch<N>(i * N);
    Vec<typename M::Element, N> repeated[REPEATED];
#pragma unroll
    for (int k = 0; k < REPEATED; ++k)
      repeated[k] = load_places<N>(map.in[M::WHOLE + k], places, k, i * N, at[k], across);
    const auto element = [&](int k, int j) {
      return k < M::WHOLE ? whole(k, j) : to_float(repeated[k < M::WHOLE ? 0 : k - M::WHOLE].v[j]);
    };
    map.template finish<N>(element, of, i * N);
  }
}

template <int N, typename M, int REPEATED>
void launch_repeated(const MbcCall& call, int64_t elements, const Strided<REPEATED>& places, M map) {
  MBC_LAUNCH((map_repeated<N, M, REPEATED>), blocks_for(elements / N), THREADS, call.stream, map, elements / N, places,
             !places.vectorizable(N));
}

template <typename F>
const char* run_generated(const MbcCall& call, const GeneratedMap<F>& map) {
  using M = GeneratedMap<F>;
  constexpr int N = WIDTH<typename F::Element>;
  const auto& a = arguments<GeneratedArguments>(call);
  if constexpr (F::REPEATED > 0) {
    const int64_t* more = behind<GeneratedArguments>(call);
    const Strided<F::REPEATED> places(more);
    const bool vectors = places.vectorizable(N) || places.vectorizable_across_lines(N);
    if (map.vectorizable() && vectors)
      launch_repeated<N>(call, a.elements, places, map);
    else
      launch_repeated<1>(call, a.elements, places, map);
  } else if constexpr (std::is_empty_v<typename F::Channel>) {
    const int64_t vectors = map.vectorizable() ? a.elements / N : 0;
    MBC_LAUNCH((map_elements<N, M>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, map, vectors,
               a.elements);
  } else {
    run_map(call.stream, a.layout, a.rows, a.channels, a.inner, map);
  }
  return launched();
}

}  // namespace mbc
