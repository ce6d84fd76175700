// Depthwise convolutions: every channel is convolved with filters of its own, so that there is nothing to share between
// channels and all that counts is to read and write every byte once.
//
// A block owns some channels (channels last: neighbours, up to a warp of vectors; channels first: one) and a run of tiles
// of output pixels. A thread makes one tile after another, of N neighbouring channels, in registers: what its windows share is
// read once, and what neighbouring tiles share is still in the cache. Kernels of 3 x 3 without dilation, strides of 1 or
// 2; `multiplier` is the number of filters a channel has. convolution.cu takes everything else.
#include "mbc_images.cuh"

#include <cstring>

struct DepthwiseArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t multiplier;
  int64_t height;
  int64_t width;
  int64_t out_height;
  int64_t out_width;
  int64_t stride;
  int64_t pad_top;
  int64_t pad_left;
  int64_t parts;
  int64_t accumulate;
};

namespace mbc {

// Channels a thread, channels last. The filter pass has nine sums for each: more than four do not fit the registers.
template <typename T>
constexpr int DEPTHWISE_VECTOR = WIDTH<T>;
constexpr int DEPTHWISE_FILTER_VECTOR = 4;

// One side of the convolution. A sample has fewer than 2^31 elements, so that places in it need 32 bits: this arithmetic
// is most of what these kernels do.
struct Samples {
  int64_t n_stride, c_stride, channels;
  int32_t height, width, y_stride, x_stride;

  explicit Samples(const Image& image)
      : n_stride(image.n_stride), c_stride(image.c_stride), channels(image.channels),
        height(static_cast<int32_t>(image.height)), width(static_cast<int32_t>(image.width)),
        y_stride(static_cast<int32_t>(image.y_stride)), x_stride(static_cast<int32_t>(image.x_stride)) {}

  __device__ int64_t plane(int64_t n, int64_t c) const { return n * n_stride + c * c_stride; }
};

struct Depthwise {
  Samples image, output;
  int64_t rows, multiplier;
  int32_t pad_top, pad_left;

  explicit Depthwise(const DepthwiseArguments& a)
      : image(Image(a.layout, a.channels, a.height, a.width)),
        output(Image(a.layout, a.channels * a.multiplier, a.out_height, a.out_width)), rows(a.rows),
        multiplier(a.multiplier), pad_top(static_cast<int32_t>(a.pad_top)),
        pad_left(static_cast<int32_t>(a.pad_left)) {}
};

// What is compiled: channels a thread, stride, side of the kernel, and the tile of a thread in output pixels.
template <int N_, int S_>
struct DepthwiseSize {
  static constexpr int N = N_, S = S_, K = 3;
  static constexpr int HEIGHT = (N == 1 ? 8 : 16 / N) / S, WIDTH = 2;
  static constexpr int BLOCKS = N == 1 ? 3 : 2;  // that a multiprocessor has registers for
  static constexpr int WINDOW_HEIGHT = (HEIGHT - 1) * S + K, WINDOW_WIDTH = (WIDTH - 1) * S + K;
  // Backward data goes by tiles of image pixels: S x S of them for each of UP x ACROSS positions of the stride. An
  // output pixel reaches REACH of these positions.
  static constexpr int REACH = (K + S - 1) / S;
  static constexpr int UP = HEIGHT, ACROSS = S == 1 ? WIDTH : 1;
};

// The tiles of all samples, numbered along x first, in runs of equal length: one a block.
struct TileRun {
  int64_t begin, end;
  __device__ TileRun(const Steps& steps, int64_t rows, int64_t part, int64_t parts) {
    const int64_t total = rows * steps.inner * steps.middle;
    begin = total / parts * part + min(part, total % parts);
    end = begin + total / parts + (part < total % parts ? 1 : 0);
  }
};

// Elements as they are stored, in words where they fill some: taken 16 bits at a time they cost twice the instructions.
template <int BYTES>
struct alignas(BYTES) Stored {
  uint32_t words[BYTES / 4];
};
template <>
struct alignas(2) Stored<2> {
  uint16_t words[1];
};

template <int N>
__device__ inline void widen(float (&to)[N], const Stored<N * 4>& from, float) {
  memcpy(to, from.words, sizeof to);
}
// bf16 is the upper half of fp32.
template <int N>
__device__ inline void widen(float (&to)[N], const Stored<N * 2>& from, __nv_bfloat16) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const uint32_t word = from.words[j / 2], bits = j % 2 ? word & 0xffff0000u : word << 16;
    memcpy(&to[j], &bits, sizeof bits);
  }
}
template <int N>
__device__ inline void widen(float (&to)[N], const Stored<N * 2>& from, __half) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const uint16_t bits = static_cast<uint16_t>(j % 2 ? from.words[j / 2] >> 16 : from.words[j / 2]);
    __half value;
    memcpy(&value, &bits, sizeof bits);
    to[j] = to_float(value);
  }
}

// The line of `COUNT` pixels of a sample from (y, x) on, 0 outside of it. `plane`: the thread's channels of the sample.
template <int COUNT, int N, typename T>
__device__ inline void fetch_line(float (&to)[COUNT][N], const T* plane, const Samples& sample, int32_t y, int32_t x) {
  using Words = Stored<N * static_cast<int>(sizeof(T))>;
  const int32_t first = y * sample.y_stride + x * sample.x_stride;
  const bool row_inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(sample.height);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    Words words{};
    if (row_inside && static_cast<uint32_t>(x + i) < static_cast<uint32_t>(sample.width))
      words = *reinterpret_cast<const Words*>(plane + (first + i * sample.x_stride));
    widen<N>(to[i], words, T());
  }
}

// Stores a tile; `pairs`: two pixels of one channel lie together, aligned.
template <int HEIGHT, int WIDTH, int N, typename T>
__device__ inline void store_tile(const float (&tile)[HEIGHT][WIDTH][N], T* plane, const Samples& sample,
                                  int32_t y, int32_t x, bool pairs) {
#pragma unroll
  for (int i = 0; i < HEIGHT; ++i) {
    if (static_cast<uint32_t>(y + i) >= static_cast<uint32_t>(sample.height)) continue;
    T* line = plane + ((y + i) * sample.y_stride + x * sample.x_stride);
    if constexpr (N == 1 && WIDTH == 2) {
      if (pairs) {
        if (x < sample.width)
          store(line, Vec<T, 2>{{from_float<T>(tile[i][0][0]), from_float<T>(tile[i][1][0])}});
        continue;
      }
    }
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      if (static_cast<uint32_t>(x + k) >= static_cast<uint32_t>(sample.width)) continue;
      Vec<T, N> v;
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(tile[i][k][j]);
      store(line + k * sample.x_stride, v);
    }
  }
}

// The filters [channels, K, K] of a block's channels, turned round so that a thread reads N channels of a tap at once.
template <int N, int K>
struct BlockFilters {
  Vec<float, N> taps[K * K * 32];

  // All threads of the block, then a barrier. `first`: of the block's channels.
  template <typename T>
  __device__ void stage(const T* w, int64_t first, int64_t channels) {
    const int count = static_cast<int>(min(static_cast<int64_t>(blockDim.x * N), channels - first)) * K * K;
    float* to = taps[0].v;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y)
      to[i % (K * K) * (blockDim.x * N) + i / (K * K)] = to_float(w[first * K * K + i]);
  }
  __device__ Vec<float, N> at(int tap) const { return taps[tap * blockDim.x + threadIdx.x]; }
};

// One channel a thread: its filter straight from the cache.
template <typename T>
struct ThreadFilter {
  const T* taps;
  __device__ Vec<float, 1> at(int tap) const { return {{to_float(taps[tap])}}; }
};

template <typename Size, typename T, typename Filter>
__device__ inline void forward_tile(const T* plane, const Filter& filter, const Depthwise& g, int32_t y, int32_t x,
                                    float (&sum)[Size::HEIGHT][Size::WIDTH][Size::N]) {
  constexpr int K = Size::K, S = Size::S;
#pragma unroll
  for (int d = 0; d < Size::WINDOW_HEIGHT; ++d) {
    float line[Size::WINDOW_WIDTH][Size::N];
    fetch_line(line, plane, g.image, y * S - g.pad_top + d, x * S - g.pad_left);
#pragma unroll
    for (int i = 0; i < Size::HEIGHT; ++i) {
      const int r = d - i * S;
      if (r < 0 || r >= K) continue;
#pragma unroll
      for (int s = 0; s < K; ++s) {
        const auto w = filter.at(r * K + s);
#pragma unroll
        for (int k = 0; k < Size::WIDTH; ++k)
#pragma unroll
          for (int j = 0; j < Size::N; ++j) sum[i][k][j] = fmaf(line[k * S + s][j], w.v[j], sum[i][k][j]);
      }
    }
  }
}

template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, Size::BLOCKS)
    depthwise_forward(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, Depthwise g, Steps steps,
                      bool pairs) {
  constexpr int N = Size::N;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * N, k = first + threadIdx.x * N;
  __shared__ BlockFilters<N, N == 1 ? 1 : Size::K> shared;
  if constexpr (N > 1) {
    shared.stage(w, first, g.output.channels);
    __syncthreads();
  }
  if (k >= g.output.channels) return;
  const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
  Walk at(steps, run.begin + threadIdx.y);
  for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
    const int32_t oy = static_cast<int32_t>(at.middle) * Size::HEIGHT, ox = static_cast<int32_t>(at.inner) * Size::WIDTH;
    float sum[Size::HEIGHT][Size::WIDTH][N] = {};
    const T* plane = x + g.image.plane(at.outer, N > 1 ? k : k / g.multiplier);
    if constexpr (N > 1)
      forward_tile<Size>(plane, shared, g, oy, ox, sum);
    else
      forward_tile<Size>(plane, ThreadFilter<T>{w + k * Size::K * Size::K}, g, oy, ox, sum);
    store_tile(sum, y + g.output.plane(at.outer, k), g.output, oy, ox, pairs);
  }
}

// Adds what the gradient `plane` gives to the image pixels at the positions (v, u) of the stride and beyond.
template <typename Size, typename T, typename Filter>
__device__ inline void data_tile(const T* plane, const Filter& filter, const Depthwise& g, int32_t v, int32_t u,
                                 float (&sum)[Size::UP * Size::S][Size::ACROSS * Size::S][Size::N]) {
  constexpr int K = Size::K, S = Size::S, LAST = Size::REACH - 1;
#pragma unroll
  for (int d = 0; d < Size::UP + LAST; ++d) {
    float line[Size::ACROSS + LAST][Size::N];
    fetch_line(line, plane, g.output, v - LAST + d, u - LAST);
#pragma unroll
    for (int i = 0; i < Size::UP * S; ++i) {
      const int r = i - (d - LAST) * S;
      if (r < 0 || r >= K) continue;
#pragma unroll
      for (int b = 0; b < Size::ACROSS + LAST; ++b)
#pragma unroll
        for (int k = 0; k < Size::ACROSS * S; ++k) {
          const int s = k - (b - LAST) * S;
          if (s < 0 || s >= K) continue;
          const auto w = filter.at(r * K + s);
#pragma unroll
          for (int j = 0; j < Size::N; ++j) sum[i][k][j] = fmaf(line[b][j], w.v[j], sum[i][k][j]);
        }
    }
  }
}

template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, Size::BLOCKS)
    depthwise_data(const T* __restrict__ dy, const T* __restrict__ w, T* __restrict__ dx, Depthwise g, Steps steps,
                   bool pairs) {
  constexpr int N = Size::N, S = Size::S;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * N, c = first + threadIdx.x * N;
  __shared__ BlockFilters<N, N == 1 ? 1 : Size::K> shared;
  if constexpr (N > 1) {
    shared.stage(w, first, g.image.channels);
    __syncthreads();
  }
  if (c >= g.image.channels) return;
  const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
  Walk at(steps, run.begin + threadIdx.y);
  for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
    // The first positions are those that begin at the image's first pixels, or before.
    const int32_t v = static_cast<int32_t>(at.middle) * Size::UP + g.pad_top / S;
    const int32_t u = static_cast<int32_t>(at.inner) * Size::ACROSS + g.pad_left / S;
    float sum[Size::UP * S][Size::ACROSS * S][N] = {};
    if constexpr (N > 1) {
      data_tile<Size>(dy + g.output.plane(at.outer, c), shared, g, v, u, sum);
    } else {
      for (int64_t k = c * g.multiplier; k < (c + 1) * g.multiplier; ++k)
        data_tile<Size>(dy + g.output.plane(at.outer, k), ThreadFilter<T>{w + k * Size::K * Size::K}, g, v, u, sum);
    }
    store_tile(sum, dx + g.image.plane(at.outer, c), g.image, v * S - g.pad_top, u * S - g.pad_left, pairs);
  }
}

// Part `blockIdx.y` of the filter gradient [filters, K, K] goes to its own place in `out` [parts, ...].
template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, Size::BLOCKS)
    depthwise_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ out, Depthwise g,
                     Steps steps, bool accumulate) {
  constexpr int N = Size::N, K = Size::K, S = Size::S;
  const int64_t k = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  float sum[K * K][N] = {};
  if (k < g.output.channels) {
    const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
    Walk at(steps, run.begin + threadIdx.y);
    for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
      const int32_t oy = static_cast<int32_t>(at.middle) * Size::HEIGHT;
      const int32_t ox = static_cast<int32_t>(at.inner) * Size::WIDTH;
      const T* plane = x + g.image.plane(at.outer, N > 1 ? k : k / g.multiplier);
      const T* gradients = dy + g.output.plane(at.outer, k);
      float gradient[Size::HEIGHT][Size::WIDTH][N];
#pragma unroll
      for (int t = 0; t < Size::HEIGHT; ++t) fetch_line(gradient[t], gradients, g.output, oy + t, ox);
#pragma unroll
      for (int d = 0; d < Size::WINDOW_HEIGHT; ++d) {
        float line[Size::WINDOW_WIDTH][N];
        fetch_line(line, plane, g.image, oy * S - g.pad_top + d, ox * S - g.pad_left);
#pragma unroll
        for (int t = 0; t < Size::HEIGHT; ++t) {
          const int r = d - t * S;
          if (r < 0 || r >= K) continue;
#pragma unroll
          for (int s = 0; s < K; ++s)
#pragma unroll
            for (int b = 0; b < Size::WIDTH; ++b)
#pragma unroll
              for (int j = 0; j < N; ++j)
                sum[r * K + s][j] = fmaf(line[b * S + s][j], gradient[t][b][j], sum[r * K + s][j]);
        }
      }
    }
  }
  __shared__ Vec<float, N> shared[THREADS];
  const unsigned self = threadIdx.y * blockDim.x + threadIdx.x;
  float* to = out + static_cast<int64_t>(blockIdx.y) * g.output.channels * K * K + k * K * K;
#pragma unroll
  for (int tap = 0; tap < K * K; ++tap) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) shared[self].v[j] = sum[tap][j];
    for (unsigned count = blockDim.y; count > 1;) {
      const unsigned half = (count + 1) / 2;
      __syncthreads();
      if (threadIdx.y + half < count)
#pragma unroll
        for (int j = 0; j < N; ++j) shared[self].v[j] += shared[self + half * blockDim.x].v[j];
      count = half;
    }
    if (threadIdx.y == 0 && k < g.output.channels)
#pragma unroll
      for (int j = 0; j < N; ++j)
        to[j * K * K + tap] = shared[self].v[j] + (accumulate ? to[j * K * K + tap] : 0.0f);
  }
}

// Eight elements a block, 32 threads over the parts of each.
__global__ void depthwise_sum(const float* __restrict__ partial, float* __restrict__ dw, int64_t elements,
                              int64_t parts, bool accumulate) {
  __shared__ double shared[32][8];
  const int64_t e = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x;
  double sum = 0.0;
  if (e < elements)
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += 32) sum += static_cast<double>(partial[part * elements + e]);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || e >= elements) return;
  for (int i = 1; i < 32; ++i) sum += shared[i][threadIdx.x];
  dw[e] = static_cast<float>(sum + (accumulate ? static_cast<double>(dw[e]) : 0.0));
}

// Threads of a block, and blocks over the channels.
struct DepthwiseGrid {
  dim3 block;
  unsigned columns;

  DepthwiseGrid(int64_t layout, int64_t channels, int vector) {
    const int64_t vectors = channels / vector;
    const bool last = layout == MBC_CHANNELS_LAST;
    // Blocks over the channels are equally wide: 36 vectors are twice 18, not 32 and 4.
    columns = static_cast<unsigned>(last ? divide_up(vectors, 32) : channels);
    block.x = last ? static_cast<unsigned>(divide_up(vectors, columns)) : 1;
    block.y = THREADS / block.x;
  }
  // Enough blocks to fill the GPU, few enough that what a block sets up serves two tiles a thread at least.
  dim3 over(int64_t tiles) const {
    const int64_t wanted = divide_up(tiles, static_cast<int64_t>(block.y) * 2);
    const int64_t most = divide_up(multiprocessors() * 16, columns);
    return dim3(columns, static_cast<unsigned>(wanted < most ? wanted : most));
  }
};

// Runs `f` with the compiled size of a launch; false where there is none.
template <int N, typename F>
bool for_depthwise_size(const DepthwiseArguments& a, F f) {
  if (a.stride == 1) return f(DepthwiseSize<N, 1>{}), true;
  if (a.stride == 2) return f(DepthwiseSize<N, 2>{}), true;
  return false;
}


// N channels a thread where they lie together. `first` and `second`: the images.
template <int N, typename T, typename F>
const char* run_depthwise(const DepthwiseArguments& a, const T* first, const T* second, F f) {
  const bool together = a.layout == MBC_CHANNELS_LAST && a.multiplier == 1 && a.channels % N == 0;
  const bool wide = together && aligned(first, sizeof(T) * N) && aligned(second, sizeof(T) * N);
  const bool known = wide ? for_depthwise_size<N>(a, f) : for_depthwise_size<1>(a, f);
  return known ? launched() : "a depthwise convolution of this stride is not in this library";
}

// Whether pairs of pixels of a line are aligned.
template <typename T>
bool in_pairs(const DepthwiseArguments& a, const T* image, int64_t width) {
  return a.layout != MBC_CHANNELS_LAST && width % 2 == 0 && aligned(image, 2 * sizeof(T));
}

}  // namespace mbc

extern "C" const char* mbc_depthwise(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DepthwiseArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    return run_depthwise<DEPTHWISE_VECTOR<T>>(a, in<T>(call, 0), in<T>(call, 2), [&](auto size) {
      using Size = decltype(size);
      const DepthwiseGrid grid(a.layout, a.channels * a.multiplier, Size::N);
      const Steps steps(divide_up(a.out_width, Size::WIDTH), divide_up(a.out_height, Size::HEIGHT), grid.block.y);
      T* y = out<T>(call, 2);
      MBC_LAUNCH((depthwise_forward<T, Size>), grid.over(a.rows * steps.inner * steps.middle), grid.block, call.stream,
                 in<T>(call, 0), in<T>(call, 1), y, Depthwise(a), steps, in_pairs(a, y, a.out_width));
    });
  });
  return launched();
}

extern "C" const char* mbc_depthwise_backward_data(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DepthwiseArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    return run_depthwise<DEPTHWISE_VECTOR<T>>(a, in<T>(call, 0), in<T>(call, 2), [&](auto size) {
      using Size = decltype(size);
      constexpr int S = Size::S;
      const DepthwiseGrid grid(a.layout, a.channels, Size::N);
      const Steps steps(divide_up(a.width + a.pad_left % S, Size::ACROSS * S),
                        divide_up(a.height + a.pad_top % S, Size::UP * S), grid.block.y);
      T* dx = out<T>(call, 2);
      MBC_LAUNCH((depthwise_data<T, Size>), grid.over(a.rows * steps.inner * steps.middle), grid.block, call.stream,
                 in<T>(call, 0), in<T>(call, 1), dx, Depthwise(a), steps,
                 a.pad_left % S == 0 && in_pairs(a, dx, a.width));
    });
  });
  return launched();
}

extern "C" const char* mbc_depthwise_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DepthwiseArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    return run_depthwise<DEPTHWISE_FILTER_VECTOR>(a, in<T>(call, 0), in<T>(call, 1), [&](auto size) {
      using Size = decltype(size);
      const DepthwiseGrid grid(a.layout, a.channels * a.multiplier, Size::N);
      const Steps steps(divide_up(a.out_width, Size::WIDTH), divide_up(a.out_height, Size::HEIGHT), grid.block.y);
      const int64_t elements = a.channels * a.multiplier * Size::K * Size::K;
      float* dw = out<float>(call, 2);
      float* target = a.parts > 1 ? out<float>(call, 3) : dw;
      MBC_LAUNCH((depthwise_filter<T, Size>), dim3(grid.columns, static_cast<unsigned>(a.parts)), grid.block,
                 call.stream, in<T>(call, 0), in<T>(call, 1), target, Depthwise(a), steps,
                 a.accumulate != 0 && a.parts == 1);
      if (a.parts > 1)
        MBC_LAUNCH(depthwise_sum, static_cast<unsigned>(divide_up(elements, 8)), dim3(8, 32), call.stream, target, dw,
                   elements, a.parts, a.accumulate != 0);
    });
  });
  return launched();
}
