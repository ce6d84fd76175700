// Reductions over everything but the channel, deterministic: parts are merged in a fixed order.
#pragma once

#include "channels.cuh"

namespace mbc {

// Two stages: `parts` blocks for each channel (or tile of channels) write a partial state each to the workspace [parts,
// channels], a second kernel adds them in order, in fp64. With one part the first stage finishes alone and needs no
// workspace. `parts` is part of the plan: it must not depend on the GPU.
//
// Each sample may be reduced by itself: `samples` is then their number, `rows` are those of a sample, and the results are
// [samples, channels].
//
// R, the reduction, has
//   Channel load(c)                        constants of a channel, loaded once by a block
//   Running begin(a)                       the initial value of a thread whose first element is a
//   push<K>(Running&, channel, a, b)       accumulates K elements of one channel
//   State settle(channel, Running, count)  the state of a thread after `count` elements, in fp32
//   State merged(many, each)               the common state of `many` threads, `each(i)` the i-th
//   Total total(State), add(Total&, Total) totals of one part and of two, in fp64
//   Prior prior(c)                         operands of the result, read while parts are in flight
//   finish(c, Prior, Total)                writes the result
//
// S, the source, has `template <int N> struct Fetched`; `fetch<N>(at)`, which reads N elements of every operand;
// `finish<N>(fetched, of, at)`, which may compute values from these and R's channel constants (of(j) for the j-th
// element), store them, and keep them in `fetched`; `first(fetched, j)` and `second(fetched, j)`, which are passed to
// R; `vectorizable()`, whether its operands are aligned for vectors; and `OPERANDS`.
//
// Channels last, thread (x, y) of a block reduces, N channels wide:
//
//               channels 0 .. N-1   N .. 2N-1   ...        threads of a column are then merged in shared memory
//   row y         thread (0, y)    thread (1, y)
//   row y + step  thread (0, y)    thread (1, y)           step = gridDim.y * blockDim.y
template <typename T, bool TWO, bool SLICED>
struct TensorSource {
  static constexpr int OPERANDS = TWO ? 2 : 1;
  Operands<T> x;

  template <int N>
  struct Fetched {
    Held<T, N> a, b;
  };
  bool vectorizable() const { return x.vectorizable(WIDTH<T>); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
    f.a = hold<N>(x.a + at);
    if constexpr (TWO) f.b = hold<N>(x.b + (SLICED ? x.slice(at) : at));
    return f;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>&, const Of&, int64_t) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const { return to_float(f.a[j]); }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const {
    if constexpr (TWO) return to_float(f.b[j]);
    return 0.0f;
  }
};

// Merges the states of all threads of a block, at [j][y][x] for channel j of thread (x, y), into those of y = 0.
template <int N, typename State, typename R>
__device__ void merge_threads(State* shared, const R& r) {
  constexpr unsigned AT_ONCE = 8;
  for (unsigned height = blockDim.y; height > 1;) {
    const unsigned left = (height + AT_ONCE - 1) / AT_ONCE;
    __syncthreads();
    for (unsigned i = threadIdx.y; i < N * left; i += blockDim.y) {
      const unsigned y = i / N;
      State* column = shared + i % N * THREADS + threadIdx.x;
      column[y * blockDim.x] = r.combine((height - y - 1) / left + 1,
                                        [&](unsigned k) { return column[(y + k * left) * blockDim.x]; });
    }
    height = left;
  }
  __syncthreads();
}

template <typename State, typename R>
__device__ void store_partial(State* partial, const State& state, int64_t channels, int64_t c, const R& r) {
  if (gridDim.y == 1)
    r.finish(c, r.prior(c), r.total(state));
  else
    partial[blockIdx.y * channels + c] = state;
}

// The rows (or vectors) of this part.
struct PartRange {
  int64_t begin, end;
  __device__ explicit PartRange(int64_t total) : PartRange(total, gridDim.y, blockIdx.y) {}
  __device__ PartRange(int64_t total, int64_t parts, int64_t part) {
    const int64_t each = total / parts, more = total % parts;
    begin = each * part + min(part, more);
    end = begin + each + (part < more ? 1 : 0);
  }
  __device__ int64_t size() const { return end - begin; }
  // The rows that are `step` apart from `first` on.
  __device__ int64_t count(int64_t first, int64_t step) const { return first < end ? (end - first - 1) / step + 1 : 0; }
};

template <int N, typename S, typename R>
__global__ void reduce_channels_first(S source, int64_t rows, int64_t channels, int64_t inner,
                                      typename R::State* partial, R r) {
  __shared__ typename R::State shared[THREADS];
  wait_for_prior_grid();
  launch_dependents();
  const int64_t c = blockIdx.x, per_row = inner / N;
  const PartRange share(rows * per_row);
  const int64_t start = share.begin + threadIdx.y;
  const auto channel = r.load(c);
  const auto of = [&](int) { return channel; };
  typename R::Running running{};
  int64_t row = start / per_row, s = start % per_row;
  const int64_t step_row = THREADS / per_row, step_s = THREADS % per_row;
  for (int64_t i = start; i < share.end; i += THREADS) {
    const int64_t at = (row * channels + c) * inner + s * N;
    auto fetched = source.template fetch<N>(at);
    source.template finish<N>(fetched, of, at);
    float a[N], b[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a[j] = source.template first<N>(fetched, j);
      b[j] = source.template second<N>(fetched, j);
    }
    if (i == start) running = r.begin(a[0]);
    r.template push<N>(running, channel, a, b);
    row += step_row;
    s += step_s;
    if (s >= per_row) {
      s -= per_row;
      ++row;
    }
  }
  shared[threadIdx.y] = r.thread_state(channel, running, share.count(start, THREADS) * N);
  merge_threads<1>(shared, r);
  if (threadIdx.y == 0) store_partial(partial, shared[0], channels, c, r);
}

// True if a thread keeps channel constants in registers. With many operands registers suffice for one word of each
// operand only: other constants are read from shared memory for every row.
template <typename S, typename R>
constexpr bool CHANNELS_IN_REGISTERS = S::OPERANDS <= 2 || sizeof(typename R::Channel) <= sizeof(float);

// Accumulators count twice: old and new values.
template <typename S, typename R, int N>
constexpr int REDUCE_BLOCKS = blocks_per_sm(
    N * (2 * sizeof(typename R::Running) + (CHANNELS_IN_REGISTERS<S, R> ? sizeof(typename R::Channel) : sizeof(float))) / 4 +
    (S::OPERANDS > 2 ? 32 : 16));

template <int N, typename S, typename R>
__global__ void __launch_bounds__(THREADS, (REDUCE_BLOCKS<S, R, N>))
    reduce_channels_last(S source, int64_t rows, int64_t channels, typename R::State* partial, R r) {
  constexpr int K = S::OPERANDS > 1 ? 2 : 4;  // rows in flight
  using Channel = typename R::Channel;
  __shared__ typename R::State shared[N * THREADS];
  __shared__ ChannelTable<Channel, N> table;
  wait_for_prior_grid();
  launch_dependents();
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  // All blocks walk from the last row to the first: the last writes of the kernel before may still be in the cache, and
  // the next kernel begins with the rows that are read last here.
  const int64_t start = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const int count = c < channels && start < rows ? static_cast<int>((rows - start - 1) / step + 1) : 0;
  const auto stride = static_cast<int32_t>(-step * channels);  // at most the rows of all threads together
  int left = count;
  const int64_t before = blockIdx.z * channels;  // of the samples before this one
  int64_t at = before * rows + (start + (count - 1) * step) * channels + c;
  typename R::Running running[N] = {};
  Channel channel[N];
  const auto of = [&](int j) -> std::conditional_t<CHANNELS_IN_REGISTERS<S, R>, const Channel&, Channel> {
    if constexpr (CHANNELS_IN_REGISTERS<S, R>)
      return channel[j];
    else
      return table.take(j);
  };
  const auto process_rows = [&](auto while_loading) {
    typename S::template Fetched<N> fetched[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < left) fetched[k] = source.template fetch<N>(at + int64_t{k} * stride);
    while_loading(fetched[0]);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < left) {
        source.template finish<N>(fetched[k], of, at + int64_t{k} * stride);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float a[1] = {source.template first<N>(fetched[k], j)};
          const float b[1] = {source.template second<N>(fetched[k], j)};
          r.template push<1>(running[j], of(j), a, b);
        }
      }
    left -= K;
    at += int64_t{K} * stride;
  };
  process_rows([&](const auto& fetched) {
    table.fill(channels, r, blockIdx.x, before);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (CHANNELS_IN_REGISTERS<S, R>) channel[j] = table.take(j);
      if (left > 0) running[j] = r.begin(source.template first<N>(fetched, j));
    }
  });
  while (left > 0) process_rows([](const auto&) {});
#pragma unroll
  for (int j = 0; j < N; ++j) shared[j * THREADS + thread] = r.thread_state(of(j), running[j], count);
  merge_threads<N>(shared, r);
  for (unsigned j = threadIdx.y; j < N; j += blockDim.y)
    if (c < channels) store_partial(partial, shared[j * THREADS + threadIdx.x], gridDim.z * channels, before + c + j, r);
}

// Few channels for each block, so that there are many blocks: the limit is latency, not bytes.
template <typename R>
__global__ void merge_parts(const typename R::State* partial, int64_t parts, int64_t channels, R r) {
  using Total = typename R::Total;
  constexpr int CHANNELS_PER_BLOCK = 4, PARTS_AT_ONCE = THREADS / CHANNELS_PER_BLOCK;
  __shared__ Total shared[PARTS_AT_ONCE][CHANNELS_PER_BLOCK];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * CHANNELS_PER_BLOCK + threadIdx.x;
  typename R::Prior prior{};
  if (threadIdx.y == 0 && c < channels) prior = r.prior(c);
  Total total{};
  wait_for_prior_grid();
  if (c < channels) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += PARTS_AT_ONCE) r.add(total, r.total(partial[part * channels + c]));
  }
  shared[threadIdx.y][threadIdx.x] = total;
  for (int half = PARTS_AT_ONCE / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) r.add(shared[threadIdx.y][threadIdx.x], shared[threadIdx.y + half][threadIdx.x]);
  }
  if (threadIdx.y == 0 && c < channels) r.finish(c, prior, shared[0][threadIdx.x]);
}

template <typename R>
void merge_all_parts(cudaStream_t stream, int64_t parts, int64_t channels, const typename R::State* partial, R r) {
  MBC_LAUNCH_NEXT((merge_parts<R>), static_cast<unsigned>(divide_up(channels, 4)), dim3(4, THREADS / 4), stream, partial,
                  parts, channels, r);
}

// T: the type of the vectors' elements. Channels last: `rows` covers all axes but channels.
template <typename T, typename S, typename R>
void reduce_rows_of(cudaStream_t stream, int64_t rows, int64_t channels, int64_t parts, S source, void* workspace,
                    R r, int64_t samples = 1) {
  auto* partial = static_cast<typename R::State*>(workspace);
  by_vectors<WIDTH<T>>(channels % WIDTH<T> == 0 && source.vectorizable(), [&](auto n) {
    const ChannelTiling tiling(channels / n);
    const dim3 grid(tiling.columns, static_cast<unsigned>(parts), static_cast<unsigned>(samples));
    MBC_LAUNCH((reduce_channels_last<n, S, R>), grid, dim3(tiling.threads_x, tiling.threads_y()), stream, source, rows,
               channels, partial, r);
  });
  if (parts > 1) merge_all_parts(stream, parts, samples * channels, partial, r);
}

template <typename T, typename S, typename R>
void reduce_channels_of(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner,
                        int64_t parts, S source, void* workspace, R r, int64_t samples = 1) {
  if (layout == MBC_CHANNELS_LAST)
    return reduce_rows_of<T>(stream, rows * inner, channels, parts, source, workspace, r, samples);
  channels *= samples;
  auto* partial = static_cast<typename R::State*>(workspace);
  by_vectors<WIDTH<T>>(inner % WIDTH<T> == 0 && source.vectorizable(), [&](auto n) {
    const dim3 grid(static_cast<unsigned>(channels), static_cast<unsigned>(parts));
    MBC_LAUNCH((reduce_channels_first<n, S, R>), grid, dim3(1, THREADS), stream, source, rows, channels, inner, partial,
               r);
  });
  if (parts > 1) merge_all_parts(stream, parts, channels, partial, r);
}

template <typename T, typename S, typename R>
void reduce_image(const MbcCall& call, const SumArguments& a, const S& source, void* workspace, const R& r) {
  reduce_channels_of<T>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, source, workspace, r);
}

}  // namespace mbc
