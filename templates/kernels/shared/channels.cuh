// Maps with constants for each channel: a bias, a mean, a scale.
//
// A tensor [rows, channels, inner] is stored channels first, ((n * channels) + c) * inner + s, or channels last, ((n *
// inner) + s) * channels + c. With channels first, a vector belongs to one channel and threads walk over (plane,
// inner). With channels last, a thread keeps its channels and walks down the rows, so that channel constants are loaded
// once.
#pragma once

#include "device.cuh"
#include "image_arguments.h"

namespace mbc {

// Resident blocks of a multiprocessor for launch bounds, from the words that a thread keeps in registers.
constexpr int blocks_per_sm(size_t words) { return words <= 48 ? 4 : 3; }

// Threads of a block over the vectors of a row, divided evenly: few threads are idle, and with one column of blocks the
// reads of a block are contiguous.
struct ChannelTiling {
  unsigned columns, threads_x;  // blocks that cover the vectors; vectors of a block, up to 32
  unsigned threads_y() const { return THREADS / threads_x; }

  // `together`: neighbouring threads that share a block, and a warp.
  explicit ChannelTiling(int64_t vectors, int together = 1)
      : columns(static_cast<unsigned>(divide_up(vectors, 32))),
        threads_x(static_cast<unsigned>(divide_up(vectors / together, columns) * together)) {}
};

// Up to three operands; operands that a function does not have are null. The last one may be a slice of a wider tensor.
template <typename T>
struct Operands {
  const T *a, *b, *c = nullptr;
  Slice slice = {};

  bool vectorizable(int width) const { return aligned(a, 16) && aligned(b, 16) && aligned(c, 16) && slice.gap % width == 0; }
};

// MORE: operands after the first. SLICED: whether the last of them is a slice.
template <typename T, int N, int MORE, bool SLICED>
struct Loaded {
  Held<T, N> a, b, c;

  __device__ void fetch(const Operands<T>& x, int64_t at) {
    a = hold<N>(x.a + at);
    const int64_t last = SLICED ? x.slice(at) : at;
    if constexpr (MORE == 1) b = hold<N>(x.b + last);
    if constexpr (MORE == 2) b = hold<N>(x.b + at), c = hold<N>(x.c + last);
  }
  template <typename F, typename Channel>
  __device__ float map(const F& f, const Channel& channel, int j) const {
    if constexpr (MORE == 2)
      return f(channel, to_float(a[j]), to_float(b[j]), to_float(c[j]));
    else
      return f(channel, to_float(a[j]), MORE == 1 ? to_float(b[j]) : 0.0f);
  }
};

// Channel constants of a block in shared memory, each computed by one thread: roots and divisions cost more than a few
// rows of a small tensor. Stored word by word to avoid bank conflicts.
template <typename Channel, int N>
struct ChannelTable {
  static constexpr int WORDS = std::is_empty_v<Channel> ? 0 : sizeof(Channel) / sizeof(float);
  float words[WORDS * N * 32 + 1];

  // Computes the constants of the block's tile; they may be read after a barrier. `before`: channels of the samples
  // before this one, if each sample has constants of its own.
  template <typename F>
  __device__ void fill(int64_t channels, const F& f, unsigned tile = blockIdx.x, int64_t before = 0) {
    if constexpr (WORDS > 0) {
      const unsigned count = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
      const int64_t first = static_cast<int64_t>(tile) * count;
#pragma unroll 1
      for (unsigned i = thread; i < count; i += blockDim.x * blockDim.y) {
        if (first + i >= channels) break;
        put(i, f.load(before + first + i));
      }
    }
  }
  // The constants of the tile's i-th channel.
  __device__ void put(unsigned i, const Channel& channel) {
    if constexpr (WORDS > 0) {
      float own[WORDS];
      memcpy(own, &channel, sizeof(channel));
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[(w * N + i % N) * 32 + i / N] = own[w];
    }
  }
  // The constants of this thread's j-th channel.
  __device__ Channel take(int j) const {
    Channel channel{};
    if constexpr (WORDS > 0) {
      float own[WORDS];
#pragma unroll
      for (int w = 0; w < WORDS; ++w) own[w] = words[(w * N + j) * 32 + threadIdx.x];
      memcpy(&channel, own, sizeof(channel));
    }
    return channel;
  }
};

// Where the result of a map is stored: in a tensor of the same shape;
template <typename T>
struct StoreResult {
  template <int N>
  static constexpr int NEIGHBOURS = 1;  // threads that store something together
  T* y;

  bool vectorizable(int) const { return aligned(y, 16); }
  template <int N>
  __device__ void store(int64_t at, int64_t, int64_t, const float (&result)[N]) const { store_floats(y + at, result); }
};

// there, and a slice of channels in a tensor of its own, too;
template <typename T>
struct StoreWithSlice {
  template <int N>
  static constexpr int NEIGHBOURS = 1;
  T *y, *part;
  int64_t start, count;

  bool vectorizable(int width) const { return aligned(y, 16) && aligned(part, 16) && start % width == 0 && count % width == 0; }
  template <int N>
  __device__ void store(int64_t at, int64_t row, int64_t c, const float (&result)[N]) const {
    store_floats(y + at, result);
    if (c >= start && c < start + count) store_floats(part + row * count + (c - start), result);
  }
};

// there, and the bit mask that says whether each stored element is positive; both channels last.
template <typename T>
struct StoreWithReluMask {
  template <int N>
  static constexpr int NEIGHBOURS = 8 / N;  // threads that share a byte
  T* y;
  uint8_t* relu_mask;

  bool vectorizable(int) const { return aligned(y, 16); }
  template <int N>
  __device__ void store(int64_t at, int64_t, int64_t c, const float (&result)[N]) const {
    const Held<T, N> kept = rounded<T>(result);
    store_held(y + at, kept);
    const auto first = static_cast<unsigned>(c) % 8;
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) bits |= static_cast<unsigned>(to_float(kept[j]) > 0.0f) << j;
    if constexpr (NEIGHBOURS<N> > 1) {
      bits <<= first;
      const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
      const unsigned group = ((1u << NEIGHBOURS<N>)-1) << (lane - first / N);
#pragma unroll
      for (int step = 1; step < NEIGHBOURS<N>; step *= 2) bits |= __shfl_xor_sync(group, bits, step);
    }
    if (first == 0) relu_mask[at / 8] = static_cast<uint8_t>(bits);
  }
};

// Constants may be those of one sample (instance normalization): the samples are then blocks along z with channels last,
// and with channels first as many channels more. `rows` are those of a sample.
//
// B, the body of a map, has
//   Channel load(c)                       constants of a channel
//   Fetched<N>, fetch<N>(at)              N elements of each of its OPERANDS tensors
//   finish<N>(fetched, of, at, row, c)    computes N elements of every result and stores them; of(j): the constants of
//                                         the j-th element's channel. `row` and `c` are known with channels last only
//   NEIGHBOURS<N>                         threads that store something together
//   vectorizable()                        whether operands and results are aligned for vectors
//
// One result of up to three operands. F has `using Channel`, `Channel load(int64_t c) const` and `float operator()(const
// Channel&, float a, float b) const`, with a third element if MORE is 2.
template <typename T, int MORE, bool SLICED, typename Out, typename F>
struct MapBody {
  using Element = T;
  using Channel = typename F::Channel;
  template <int N>
  using Fetched = Loaded<T, N, MORE, SLICED>;
  template <int N>
  static constexpr int NEIGHBOURS = Out::template NEIGHBOURS<N>;
  static constexpr int OPERANDS = MORE + 1;
  Operands<T> x;
  Out out;
  F f;

  bool vectorizable() const { return x.vectorizable(WIDTH<T>) && out.vectorizable(WIDTH<T>); }
  __device__ Channel load(int64_t c) const { return f.load(c); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> fetched;
    fetched.fetch(x, at);
    return fetched;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>& fetched, const Of& of, int64_t at, int64_t row, int64_t c) const {
    float result[N];
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = fetched.map(f, of(j), j);
    out.template store<N>(at, row, c, result);
  }
};

template <int N, typename B>
__global__ void map_channels_first(B body, int64_t vectors, Steps steps) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < vectors; i += stride, at.advance(steps)) {
    const auto channel = body.load(at.middle);
    auto fetched = body.template fetch<N>(i * N);
    body.template finish<N>(fetched, [&](int) -> const auto& { return channel; }, i * N, 0, 0);
  }
}

template <typename B, int N>
constexpr int MAP_BLOCKS = B::OPERANDS > 2 ? 2 : blocks_per_sm(N * sizeof(typename B::Channel) / 4 + 16);
template <typename B>
constexpr int MAP_ROWS = B::OPERANDS > 1 ? 2 : 4;  // in flight: 64 bytes of a thread
constexpr int MAP_WAVES = 3, WAVE_ROWS = 16;  // most waves of blocks, and rows that a thread should have in each

template <int N, typename B>
__global__ void __launch_bounds__(THREADS, (MAP_BLOCKS<B, N>)) map_channels_last(B body, int64_t rows, int64_t channels) {
  constexpr int K = MAP_ROWS<B>;
  using Channel = typename B::Channel;
  __shared__ ChannelTable<Channel, N> table;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int64_t start = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const auto stride = static_cast<int32_t>(step * channels);  // at most the rows of all threads together
  int left = c < channels && start < rows ? static_cast<int>((rows - start - 1) / step + 1) : 0;
  int64_t at = (blockIdx.z * rows + start) * channels + c, row = start;
  wait_for_prior_grid();
  launch_dependents();
  Channel channel[N];
  const auto of = [&](int j) -> const Channel& { return channel[j]; };
  const auto process_rows = [&](auto while_loading) {
    typename B::template Fetched<N> fetched[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < left) fetched[k] = body.template fetch<N>(at + int64_t{k} * stride);
    while_loading();
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < left) body.template finish<N>(fetched[k], of, at + int64_t{k} * stride, row + k * step, c);
    left -= K;
    at += int64_t{K} * stride;
    row += K * step;
  };
  process_rows([&] {
    table.fill(channels, body, blockIdx.x, blockIdx.z * channels);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = table.take(j);
  });
  while (left > 0) process_rows([] {});
}

// `rows` covers all axes but channels, and but samples.
template <typename B>
void run_map_rows(cudaStream_t stream, int64_t rows, int64_t channels, B body, int64_t samples = 1) {
  constexpr int VECTOR = WIDTH<typename B::Element>;
  by_vectors<VECTOR>(channels % VECTOR == 0 && body.vectorizable(), [&](auto n) {
    constexpr int N = n;
    const ChannelTiling tiling(channels / N, B::template NEIGHBOURS<N>);
    const int64_t wanted = divide_up(rows, tiling.threads_y() * MAP_ROWS<B>);
    const int64_t wave = max(int64_t{1}, multiprocessors() * MAP_BLOCKS<B, N> / (tiling.columns * samples));
    const int64_t waves = min(int64_t{MAP_WAVES}, max(int64_t{1}, wanted * MAP_ROWS<B> / (wave * WAVE_ROWS)));
    const dim3 grid(tiling.columns, static_cast<unsigned>(min(wanted, wave * waves)), static_cast<unsigned>(samples));
    MBC_LAUNCH((map_channels_last<N, B>), grid, dim3(tiling.threads_x, tiling.threads_y()), stream, body, rows, channels);
  });
}

template <typename B>
void run_map(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner, B body,
             int64_t samples = 1) {
  if (layout == MBC_CHANNELS_LAST) return run_map_rows(stream, rows * inner, channels, body, samples);
  constexpr int VECTOR = WIDTH<typename B::Element>;
  by_vectors<VECTOR>(inner % VECTOR == 0 && body.vectorizable(), [&](auto n) {
    const int64_t vectors = rows * samples * channels * inner / n;
    const unsigned blocks = blocks_for(vectors);
    const Steps steps(inner / n, samples * channels, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((map_channels_first<n, B>), blocks, THREADS, stream, body, vectors, steps);
  });
}

// Channels last: `rows` covers all axes but channels.
template <int MORE, bool SLICED, typename T, typename Out, typename F>
void map_channels_to(cudaStream_t stream, int64_t rows, int64_t channels, Operands<T> x, Out out, F f) {
  run_map_rows(stream, rows, channels, MapBody<T, MORE, SLICED, Out, F>{x, out, f});
}

template <int MORE, bool SLICED = false, typename T, typename F>
void map_channels(cudaStream_t stream, int64_t layout, int64_t rows, int64_t channels, int64_t inner, Operands<T> x,
                  T* y, F f) {
  run_map(stream, layout, rows, channels, inner, MapBody<T, MORE, SLICED, StoreResult<T>, F>{x, {y}, f});
}

template <int MORE, bool SLICED = false, typename T, typename F>
void map_image(const MbcCall& call, const ImageArguments& a, Operands<T> x, T* y, F f) {
  map_channels<MORE, SLICED>(call.stream, a.layout, a.rows, a.channels, a.inner, x, y, f);
}

}  // namespace mbc
