// Kernels in which every channel has something of its own: a bias, a mean, a sum.
//
// A tensor [rows, channels, inner] is stored channels first, ((n * channels) + c) * inner + s, or channels last,
// ((n * inner) + s) * channels + c. Channels first, a vector lies in one channel and threads walk over (plane, inner).
// Channels last, a thread keeps its channels and walks down the rows, so that what a channel has is loaded once.
#pragma once

#include "mbc_device.cuh"

namespace mbc {

// Blocks that a multiprocessor is to hold at once, by the words that a thread keeps: with its loop beside them they must
// fit its share of the registers. All grids are whole waves of both.
constexpr int resident(size_t words) { return words <= 48 ? 4 : 3; }
constexpr int WAVES_BLOCKS = 12;  // for each multiprocessor: three waves of four, or four of three

// Up to two operands; the second is null for functions of one.
template <typename T>
struct Operands {
  const T *a, *b;
};

// Runs `work(at, stride, count, first)` for `rows` rows, the first at element `at`, the next a stride further: K of them
// at once (then `count` is a constant), the rest together.
template <int K, typename Work>
__device__ inline void down_rows(int64_t at, int64_t stride, int64_t rows, Work work) {
  int left = static_cast<int>(rows);
  bool first = true;
  for (; left >= K; left -= K, at += K * stride, first = false) work(at, stride, K, first);
  if (left > 0) work(at, stride, left, first);
}

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

template <typename F, int N>
constexpr int MAP_BLOCKS = resident(N * sizeof(typename F::Channel) / 4 + 16);

template <typename T, int N, bool TWO, typename F>
__global__ void __launch_bounds__(THREADS, (MAP_BLOCKS<F, N>))
    map_channels_last(Operands<T> x, T* y, int64_t rows, int64_t channels, F f) {
  constexpr int K = TWO ? 2 : 4;  // rows read at once: 64 bytes on their way for every thread
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (c >= channels) return;
  typename F::Channel channel[N];
#pragma unroll
  for (int j = 0; j < N; ++j) channel[j] = f.load(c + j);
  const int64_t start = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  down_rows<K>(start * channels + c, step * channels, start < rows ? (rows - start - 1) / step + 1 : 0,
               [&](int64_t at, int64_t stride, int count, bool) {
    Vec<T, N> a[K], b[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < count) {
        a[k] = load<N>(x.a + at + k * stride);
        if constexpr (TWO) b[k] = load<N>(x.b + at + k * stride);
      }
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < count) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          a[k].v[j] = from_float<T>(f(channel[j], to_float(a[k].v[j]), TWO ? to_float(b[k].v[j]) : 0.0f));
        store(y + at + k * stride, a[k]);
      }
  });
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
    const int64_t most = divide_up(multiprocessors() * WAVES_BLOCKS, tiling.columns);
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
// state each in the workspace [parts, channels], a second kernel adds them in order, in fp64. With one part the first
// stage finishes by itself and needs no workspace. `parts` comes with the plan: it must not depend on the GPU.
//
// R has
//   Channel load(c)                        what a channel has, loaded once a thread
//   push<K>(Running&, channel, a, b, first)  K elements of one channel for one thread; `first`: its first ones
//   State settle(c, Running, count)        what a thread has after `count` elements, in fp32
//   merge(State&, State)                   of two threads
//   Total total(State), add(Total&, Total) of a part, and of two, in fp64
//   finish(c, Total)                       writes the result
//
// S is where the elements come from. It has `template <int N> struct Fetched`, `fetch<N>(at)` that reads N elements of
// every operand, `finish<N>(fetched, at)` that may write what comes of them, `first(fetched, j)` and
// `second(fetched, j)`, which R gets, `whole()`, whether its operands are aligned for vectors, and `OPERANDS`.
template <typename T, bool TWO>
struct InMemory {
  static constexpr int OPERANDS = TWO ? 2 : 1;
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

// The states of all threads of a block, those of thread (x, y) at [j][y][x] for its N channels, into those of y = 0.
template <int N, typename State, typename R>
__device__ void merge_threads(State* shared, const R& r) {
  constexpr unsigned AT_ONCE = 8;
  for (unsigned height = blockDim.y; height > 1;) {
    const unsigned left = (height + AT_ONCE - 1) / AT_ONCE;
    __syncthreads();
    for (unsigned i = threadIdx.y; i < N * left; i += blockDim.y) {
      State* column = shared + i % N * THREADS + threadIdx.x;
      State into = column[i / N * blockDim.x];
      for (unsigned y = i / N + left; y < height; y += left) r.merge(into, column[y * blockDim.x]);
      column[i / N * blockDim.x] = into;
    }
    height = left;
  }
  __syncthreads();
}

template <typename State, typename R>
__device__ void hand_on(State* partial, const State& state, int64_t channels, int64_t c, const R& r) {
  if (gridDim.y == 1)
    r.finish(c, r.total(state));
  else
    partial[blockIdx.y * channels + c] = state;
}

// The rows (or vectors) of this part.
struct Share {
  int64_t begin, end;
  __device__ explicit Share(int64_t total) {
    const int64_t parts = gridDim.y, part = blockIdx.y, each = total / parts, more = total % parts;
    begin = each * part + min(part, more);
    end = begin + each + (part < more ? 1 : 0);
  }
  // Of those `step` apart from `first` on.
  __device__ int64_t count(int64_t first, int64_t step) const { return first < end ? (end - first - 1) / step + 1 : 0; }
};

template <int N, typename S, typename R>
__global__ void reduce_channels_first(S source, int64_t rows, int64_t channels, int64_t inner,
                                      typename R::State* partial, R r) {
  __shared__ typename R::State shared[THREADS];
  const int64_t c = blockIdx.x, per_row = inner / N;
  const Share share(rows * per_row);
  const int64_t start = share.begin + threadIdx.y;
  const auto channel = r.load(c);
  typename R::Running running{};
  int64_t row = start / per_row, s = start % per_row;
  const int64_t step_row = THREADS / per_row, step_s = THREADS % per_row;
  for (int64_t i = start; i < share.end; i += THREADS) {
    const int64_t at = (row * channels + c) * inner + s * N;
    const auto fetched = source.template fetch<N>(at);
    source.template finish<N>(fetched, at);
    float a[N], b[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a[j] = source.template first<N>(fetched, j);
      b[j] = source.template second<N>(fetched, j);
    }
    r.template push<N>(running, channel, a, b, i == start);
    row += step_row;
    s += step_s;
    if (s >= per_row) {
      s -= per_row;
      ++row;
    }
  }
  shared[threadIdx.y] = r.settle(c, running, share.count(start, THREADS) * N);
  merge_threads<1>(shared, r);
  if (threadIdx.y == 0) hand_on(partial, shared[0], channels, c, r);
}

// What a thread sums in is needed twice, as it was and as it becomes.
template <typename S, typename R, int N>
constexpr int REDUCE_BLOCKS =
    resident(N * (2 * sizeof(typename R::Running) + sizeof(typename R::Channel)) / 4 + (S::OPERANDS > 2 ? 32 : 16));

template <int N, typename S, typename R>
__global__ void __launch_bounds__(THREADS, (REDUCE_BLOCKS<S, R, N>))
    reduce_channels_last(S source, int64_t rows, int64_t channels, typename R::State* partial, R r) {
  constexpr int K = S::OPERANDS > 1 ? 2 : 4;  // rows read at once
  __shared__ typename R::State shared[N * THREADS];
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const Share share(rows);
  const int64_t start = share.begin + threadIdx.y, step = blockDim.y;
  if (c < channels) {
    typename R::Running running[N] = {};
    typename R::Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = r.load(c + j);
    const int64_t count = share.count(start, step);
    down_rows<K>(start * channels + c, step * channels, count, [&](int64_t at, int64_t stride, int some, bool first) {
      typename S::template Fetched<N> fetched[K];
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (k < some) fetched[k] = source.template fetch<N>(at + k * stride);
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (k < some) source.template finish<N>(fetched[k], at + k * stride);
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (k < some) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float a[1] = {source.template first<N>(fetched[k], j)};
            const float b[1] = {source.template second<N>(fetched[k], j)};
            r.template push<1>(running[j], channel[j], a, b, k == 0 && first);
          }
        }
    });
#pragma unroll
    for (int j = 0; j < N; ++j) shared[j * THREADS + thread] = r.settle(c + j, running[j], count);
  }
  merge_threads<N>(shared, r);
  for (unsigned j = threadIdx.y; j < N; j += blockDim.y)
    if (c < channels) hand_on(partial, shared[j * THREADS + threadIdx.x], channels, c + j, r);
}

// Few channels a block, so that there are many blocks: what has to be read is little, but each read takes its time.
template <typename R>
__global__ void merge_parts(const typename R::State* partial, int64_t parts, int64_t channels, R r) {
  using Total = typename R::Total;
  constexpr int ALONG = 4, DOWN = THREADS / ALONG;
  __shared__ Total shared[DOWN][ALONG];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * ALONG + threadIdx.x;
  Total total{};
  if (c < channels) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += DOWN) r.add(total, r.total(partial[part * channels + c]));
  }
  shared[threadIdx.y][threadIdx.x] = total;
  for (int half = DOWN / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) r.add(shared[threadIdx.y][threadIdx.x], shared[threadIdx.y + half][threadIdx.x]);
  }
  if (threadIdx.y == 0 && c < channels) r.finish(c, shared[0][threadIdx.x]);
}

template <int N, typename S, typename R>
void run_reduce_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner,
                         int64_t parts, S source, void* workspace, R r) {
  auto* partial = static_cast<typename R::State*>(workspace);
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

template <typename R>
void merge_all_parts(cudaStream_t stream, int64_t parts, int64_t channels, const typename R::State* partial, R r) {
  MBC_LAUNCH((merge_parts<R>), static_cast<unsigned>(divide_up(channels, 4)), dim3(4, THREADS / 4), stream, partial,
             parts, channels, r);
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
  if (parts > 1) merge_all_parts(stream, parts, channels, static_cast<const typename R::State*>(workspace), r);
}

template <bool TWO, typename T, typename R>
void reduce_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner, int64_t parts,
                     Operands<T> x, void* workspace, R r) {
  reduce_channels_of<T>(stream, layout, rows, channels, inner, parts, InMemory<T, TWO>{x}, workspace, r);
}

}  // namespace mbc
