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
#include "channel_reduce.cuh"
#include "generated_map_arguments.h"
#include "strided.cuh"

namespace mbc {

// F, which is generated, has
//   Element                    the type of operands and results
//   WHOLE, REPEATED, RESULTS   numbers of operands of the results' shape, of operands that are repeated along axes of
//                              the results, and of results
//   BY_SAMPLE                  whether constants and sums are those of a channel of one sample
//   Channel, load(c)           constants of a channel, a struct of floats; by sample, c counts the channels of all samples
//   operator()(channel, x, y, s)  computes from x, an element of each operand, an element y of each result, and what is
//                              added to each of its SUMS, of which there are at most two
//   finish(c, sums, totals)    computes the FINISHES results of a channel from its sums, in fp64
template <typename F>
struct GeneratedMap {
  using Element = typename F::Element;
  using Channel = typename F::Channel;
  static constexpr int WHOLE = F::WHOLE, OPERANDS = WHOLE + F::REPEATED, RESULTS = F::RESULTS;
  template <int>
  static constexpr int NEIGHBOURS = 1;

  const Element* in[OPERANDS];
  Element* out[RESULTS > 0 ? RESULTS : 1];
  F f;

  template <int N>
  struct Fetched {
    Held<Element, N> x[WHOLE > 0 ? WHOLE : 1];
    float sums[F::SUMS > 0 ? F::SUMS : 1][F::SUMS > 0 ? N : 1];
    __device__ float operator()(int k, int j) const { return to_float(x[k][j]); }
  };

  bool vectorizable() const {
    bool all = true;
    for (const Element* x : in) all = all && aligned(x, 16);
    for (int k = 0; k < RESULTS; ++k) all = all && aligned(out[k], 16);
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
  template <int N, typename Of>
  __device__ void finish(Fetched<N>& fetched, const Of& of, int64_t at, int64_t = 0, int64_t = 0) const {
    compute<N>(fetched, of, at, [&](int k, int j, float s) { fetched.sums[k][j] = s; });
  }
  // element(k, j): the j-th element of operand k. keep(k, j, s): s is added to sum k.
  template <int N, typename Get, typename Of, typename Keep>
  __device__ void compute(const Get& element, const Of& of, int64_t at, const Keep& keep) const {
    float result[RESULTS > 0 ? RESULTS : 1][N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[OPERANDS], y[RESULTS > 0 ? RESULTS : 1], s[F::SUMS > 0 ? F::SUMS : 1];
#pragma unroll
      for (int k = 0; k < OPERANDS; ++k) x[k] = element(k, j);
      f(of(j), x, y, s);
#pragma unroll
      for (int k = 0; k < F::SUMS; ++k) keep(k, j, s[k]);
#pragma unroll
      for (int k = 0; k < RESULTS; ++k) result[k][j] = y[k];
    }
#pragma unroll
    for (int k = 0; k < RESULTS; ++k) store_floats(out[k] + at, result[k]);
  }
  // For reductions (channel_reduce.cuh).
  template <int N>
  __device__ float first(const Fetched<N>& fetched, int j) const { return fetched.sums[0][j]; }
  template <int N>
  __device__ float second(const Fetched<N>& fetched, int j) const {
    if constexpr (F::SUMS > 1) return fetched.sums[1][j];
    return 0.0f;
  }
};

// Up to two sums of each channel, from which F computes results.
template <typename F>
struct GeneratedReduction {
  F f;
  float* out[F::FINISHES > 0 ? F::FINISHES : 1];
  int64_t accumulate;

  struct State {
    float sums[2];
  };
  struct Total {
    double sums[2];
  };
  struct Prior {
    float values[F::FINISHES > 0 ? F::FINISHES : 1];
  };
  using Running = State;
  using Channel = typename F::Channel;

  __device__ Channel load(int64_t c) const { return f.load(c); }
  __device__ State begin(float) const { return {}; }
  template <int K>
  __device__ void push(State& state, const Channel&, const float (&a)[K], const float (&b)[K]) const {
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) first += a[k], second += b[k];
    state.sums[0] += first;
    state.sums[1] += second;
  }
  __device__ State thread_state(const Channel&, const State& state, int64_t) const { return state; }
  template <typename Each>
  __device__ State combine(unsigned many, Each each) const {
    State all{};
    for (unsigned i = 0; i < many; ++i) {
      const State one = each(i);
      all.sums[0] += one.sums[0];
      all.sums[1] += one.sums[1];
    }
    return all;
  }
  __device__ Total total(const State& state) const { return {{state.sums[0], state.sums[1]}}; }
  __device__ void add(Total& into, const Total& from) const {
    into.sums[0] += from.sums[0];
    into.sums[1] += from.sums[1];
  }
  __device__ Prior prior(int64_t c) const {
    Prior prior{};
    if (accumulate)
      for (int k = 0; k < F::FINISHES; ++k) prior.values[k] = out[k][c];
    return prior;
  }
  __device__ void finish(int64_t c, const Prior& prior, const Total& total) const {
    double values[F::FINISHES > 0 ? F::FINISHES : 1];
    f.finish(c, total.sums, values);
    for (int k = 0; k < F::FINISHES; ++k) out[k][c] = static_cast<float>(static_cast<double>(prior.values[k]) + values[k]);
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
  if (i < vectors) {
    auto fetched = map.template fetch<N>(i * N);
    map.template finish<N>(fetched, of, i * N);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride) {
    auto fetched = map.template fetch<1>(e);
    map.template finish<1>(fetched, of, e);
  }
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
    map.template compute<N>(element, of, i * N, [](int, int, float) {});
  }
}

template <typename F>
const char* run_generated(const MbcCall& call, const GeneratedMap<F>& map, GeneratedReduction<F> sums) {
  using M = GeneratedMap<F>;
  constexpr int N = WIDTH<typename F::Element>;
  const auto& a = arguments<GeneratedArguments>(call);
  const int64_t samples = F::BY_SAMPLE ? a.rows : 1, rows = F::BY_SAMPLE ? 1 : a.rows;
  if constexpr (F::SUMS > 0) {
    sums.accumulate = a.accumulate;
    void* workspace = a.parts > 1 ? call.pointers[call.pointer_count - 1] : nullptr;
    reduce_channels_of<typename F::Element>(call.stream, a.layout, rows, a.channels, a.inner, a.parts, map, workspace,
                                            sums, samples);
  } else if constexpr (F::REPEATED > 0) {
    const int64_t* more = behind<GeneratedArguments>(call);
    const Strided<F::REPEATED> places(more);
    const bool vectors = places.vectorizable(N) || places.vectorizable_across_lines(N);
    by_vectors<N>(map.vectorizable() && vectors, [&](auto n) {
      MBC_LAUNCH((map_repeated<n, M, F::REPEATED>), blocks_for(a.elements / n), THREADS, call.stream, map,
                 a.elements / n, places, !places.vectorizable(n));
    });
  } else if constexpr (std::is_empty_v<typename F::Channel>) {
    const int64_t vectors = map.vectorizable() ? a.elements / N : 0;
    MBC_LAUNCH((map_elements<N, M>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, map, vectors,
               a.elements);
  } else {
    run_map(call.stream, a.layout, rows, a.channels, a.inner, map, samples);
  }
  return launched();
}

}  // namespace mbc
