// Kernels in which every channel has something of its own: a bias, a mean, a sum.
//
// A tensor [rows, channels, inner] is stored channels first, ((n * channels) + c) * inner + s, or channels last,
// ((n * inner) + s) * channels + c. Channels first, a vector lies in one channel and threads walk over (plane, inner).
// Channels last, a thread keeps its channels and walks down the rows, so that what a channel has is loaded once.
#pragma once

#include "mbc_device.cuh"

namespace mbc {

// Up to two operands; the second is null for functions of one.
template <typename T>
struct Operands {
  const T *a, *b;
};

// F has `using Channel`, `Channel load(int64_t c) const` and `float operator()(const Channel&, float a, float b) const`.
template <typename T, int N, bool TWO, typename F>
__global__ void map_channels_first(Operands<T> x, T* y, int64_t vectors, Steps steps, F f) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < vectors; i += stride, at.advance(steps)) {
    const auto channel = f.load(at.middle);
    Vec<T, N> a = load<N>(x.a + i * N), b;
    if constexpr (TWO) b = load<N>(x.b + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j)
      a.v[j] = from_float<T>(f(channel, to_float(a.v[j]), TWO ? to_float(b.v[j]) : 0.0f));
    store(y + i * N, a);
  }
}

template <typename T, int N, bool TWO, typename F>
__global__ void map_channels_last(Operands<T> x, T* y, int64_t rows, int64_t channels, F f) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (c >= channels) return;
  typename F::Channel channel[N];
#pragma unroll
  for (int j = 0; j < N; ++j) channel[j] = f.load(c + j);
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t at = row * channels + c;
    Vec<T, N> a = load<N>(x.a + at), b;
    if constexpr (TWO) b = load<N>(x.b + at);
#pragma unroll
    for (int j = 0; j < N; ++j)
      a.v[j] = from_float<T>(f(channel[j], to_float(a.v[j]), TWO ? to_float(b.v[j]) : 0.0f));
    store(y + at, a);
  }
}

template <typename T, int N, bool TWO, typename F>
void run_map_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner,
                      Operands<T> x, T* y, F f) {
  if (layout == MBC_CHANNELS_FIRST) {
    const int64_t vectors = rows * channels * inner / N;
    const unsigned blocks = blocks_for(vectors);
    const Steps steps(inner / N, channels, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((map_channels_first<T, N, TWO, F>), blocks, THREADS, stream, x, y, vectors, steps, f);
  } else {
    const Tiling tiling(channels / N);
    const int64_t wanted = divide_up(rows * inner, tiling.down() * 4);
    const int64_t most = divide_up(multiprocessors() * 16, tiling.columns);
    const dim3 grid(tiling.columns, static_cast<unsigned>(wanted < most ? wanted : most));
    MBC_LAUNCH((map_channels_last<T, N, TWO, F>), grid, dim3(tiling.along, tiling.down()), stream, x, y, rows * inner,
               channels, f);
  }
}

template <bool TWO, typename T, typename F>
void map_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner, Operands<T> x,
                  T* y, F f) {
  constexpr int N = WIDTH<T>;
  const bool whole = (layout == MBC_CHANNELS_FIRST ? inner : channels) % N == 0;
  if (whole && aligned(x.a, 16) && aligned(x.b, 16) && aligned(y, 16))
    run_map_channels<T, N, TWO>(stream, layout, rows, channels, inner, x, y, f);
  else
    run_map_channels<T, 1, TWO>(stream, layout, rows, channels, inner, x, y, f);
}

// Reductions over everything but the channel, in two stages: `parts` blocks a channel (or a tile of channels) leave a
// state each in the workspace [parts, channels], a second kernel merges them in order, in fp64. With one part the
// first stage finishes by itself and needs no workspace. `parts` comes with the plan: it must not depend on the GPU.
//
// R has `template <typename Real> struct State` (zero when value-initialised), `using Channel`, `Channel load(c)`,
// `push<K>(State<float>&, const Channel&, const float (&a)[K], const float (&b)[K])` (K elements of one channel),
// `merge(State<Real>&, const State<Real>&)`, `widen(State<float>)` and `finish(c, State<double>)`.
//
// S is where the elements come from. It has `template <int N> struct Fetched`, `fetch<N>(at)` that reads N elements of
// every operand, `finish<N>(fetched, at)` that may write what comes of them, `first(fetched, j)` and
// `second(fetched, j)`, which R gets, and `whole()`, whether its operands are aligned for vectors.
template <typename T, bool TWO>
struct InMemory {
  Operands<T> x;

  template <int N>
  struct Fetched {
    Vec<T, N> a, b;
  };
  bool whole() const { return aligned(x.a, 16) && aligned(x.b, 16); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
    f.a = load<N>(x.a + at);
    if constexpr (TWO) f.b = load<N>(x.b + at);
    return f;
  }
  template <int N>
  __device__ void finish(const Fetched<N>&, int64_t) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const { return to_float(f.a.v[j]); }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const {
    if constexpr (TWO) return to_float(f.b.v[j]);
    return 0.0f;
  }
};

template <typename R>
__device__ void merge_block(typename R::template State<float>* shared, const R& r, unsigned along, unsigned down) {
  const unsigned x = threadIdx.x, y = threadIdx.y;
  for (unsigned half = down / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) r.merge(shared[y * along + x], shared[(y + half) * along + x]);
  }
}

template <int N, typename S, typename R>
__global__ void reduce_channels_first(S source, int64_t rows, int64_t channels, int64_t inner,
                                      typename R::template State<float>* partial, R r) {
  using State = typename R::template State<float>;
  __shared__ State shared[THREADS];
  const int64_t c = blockIdx.x, parts = gridDim.y, per_row = inner / N, total = rows * per_row;
  const int64_t begin = total / parts * blockIdx.y + min(static_cast<int64_t>(blockIdx.y), total % parts);
  const int64_t end = begin + total / parts + (blockIdx.y < total % parts ? 1 : 0);
  const auto channel = r.load(c);
  State state{};
  int64_t row = (begin + threadIdx.y) / per_row, s = (begin + threadIdx.y) % per_row;
  const int64_t step_row = THREADS / per_row, step_s = THREADS % per_row;
  for (int64_t i = begin + threadIdx.y; i < end; i += THREADS) {
    const int64_t at = (row * channels + c) * inner + s * N;
    const auto fetched = source.template fetch<N>(at);
    source.template finish<N>(fetched, at);
    float a[N], b[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a[j] = source.template first<N>(fetched, j);
      b[j] = source.template second<N>(fetched, j);
    }
    r.template push<N>(state, channel, a, b);
    row += step_row;
    s += step_s;
    if (s >= per_row) {
      s -= per_row;
      ++row;
    }
  }
  shared[threadIdx.y] = state;
  merge_block(shared, r, 1, THREADS);
  if (threadIdx.y == 0) {
    if (parts == 1)
      r.finish(c, r.widen(shared[0]));
    else
      partial[blockIdx.y * channels + c] = shared[0];
  }
}

template <int N, typename S, typename R>
__global__ void reduce_channels_last(S source, int64_t rows, int64_t channels,
                                     typename R::template State<float>* partial, R r) {
  using State = typename R::template State<float>;
  constexpr int K = 4;  // rows read at once
  __shared__ State shared[THREADS];
  const int64_t parts = gridDim.y, c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int64_t begin = rows / parts * blockIdx.y + min(static_cast<int64_t>(blockIdx.y), rows % parts);
  const int64_t end = begin + rows / parts + (blockIdx.y < rows % parts ? 1 : 0);
  State state[N] = {};
  typename R::Channel channel[N];
  if (c < channels) {
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = r.load(c + j);
    const int64_t step = blockDim.y;
    int64_t row = begin + threadIdx.y;
    for (; row + (K - 1) * step < end; row += K * step) {
      typename S::template Fetched<N> fetched[K];
#pragma unroll
      for (int k = 0; k < K; ++k) fetched[k] = source.template fetch<N>((row + k * step) * channels + c);
#pragma unroll
      for (int k = 0; k < K; ++k) source.template finish<N>(fetched[k], (row + k * step) * channels + c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float a[K], b[K];
#pragma unroll
        for (int k = 0; k < K; ++k) {
          a[k] = source.template first<N>(fetched[k], j);
          b[k] = source.template second<N>(fetched[k], j);
        }
        r.template push<K>(state[j], channel[j], a, b);
      }
    }
    for (; row < end; row += step) {
      const auto fetched = source.template fetch<N>(row * channels + c);
      source.template finish<N>(fetched, row * channels + c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float a[1] = {source.template first<N>(fetched, j)};
        const float b[1] = {source.template second<N>(fetched, j)};
        r.template push<1>(state[j], channel[j], a, b);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    __syncthreads();
    shared[threadIdx.y * blockDim.x + threadIdx.x] = state[j];
    merge_block(shared, r, blockDim.x, blockDim.y);
    if (threadIdx.y == 0 && c < channels) {
      if (parts == 1)
        r.finish(c + j, r.widen(shared[threadIdx.x]));
      else
        partial[blockIdx.y * channels + c + j] = shared[threadIdx.x];
    }
  }
}

template <typename R>
__global__ void merge_parts(const typename R::template State<float>* partial, int64_t parts, int64_t channels, R r) {
  using State = typename R::template State<double>;
  __shared__ State shared[8][32];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  State state{};
  if (c < channels)
    for (int64_t part = threadIdx.y; part < parts; part += 8) r.merge(state, r.widen(partial[part * channels + c]));
  shared[threadIdx.y][threadIdx.x] = state;
  __syncthreads();
  if (threadIdx.y == 0 && c < channels) {
    for (int i = 1; i < 8; ++i) r.merge(state, shared[i][threadIdx.x]);
    r.finish(c, state);
  }
}

template <int N, typename S, typename R>
void run_reduce_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner,
                         int64_t parts, S source, void* workspace, R r) {
  using State = typename R::template State<float>;
  State* partial = static_cast<State*>(workspace);
  if (layout == MBC_CHANNELS_FIRST) {
    const dim3 grid(static_cast<unsigned>(channels), static_cast<unsigned>(parts));
    MBC_LAUNCH((reduce_channels_first<N, S, R>), grid, dim3(1, THREADS), stream, source, rows, channels, inner,
               partial, r);
  } else {
    const Tiling tiling(channels / N);
    const dim3 grid(tiling.columns, static_cast<unsigned>(parts));
    MBC_LAUNCH((reduce_channels_last<N, S, R>), grid, dim3(tiling.along, tiling.down()), stream, source,
               rows * inner, channels, partial, r);
  }
}

// T: the elements that vectors are made of.
template <typename T, typename S, typename R>
void reduce_channels_of(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner,
                        int64_t parts, S source, void* workspace, R r) {
  constexpr int N = WIDTH<T>;
  if ((layout == MBC_CHANNELS_FIRST ? inner : channels) % N == 0 && source.whole())
    run_reduce_channels<N>(stream, layout, rows, channels, inner, parts, source, workspace, r);
  else
    run_reduce_channels<1>(stream, layout, rows, channels, inner, parts, source, workspace, r);
  if (parts > 1) {
    using State = typename R::template State<float>;
    MBC_LAUNCH((merge_parts<R>), static_cast<unsigned>(divide_up(channels, 32)), dim3(32, 8), stream,
               static_cast<const State*>(workspace), parts, channels, r);
  }
}

template <bool TWO, typename T, typename R>
void reduce_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner, int64_t parts,
                     Operands<T> x, void* workspace, R r) {
  reduce_channels_of<T>(stream, layout, rows, channels, inner, parts, InMemory<T, TWO>{x}, workspace, r);
}

}  // namespace mbc
