// Depthwise 3 x 3 convolutions at strides of 1 and 2: forward and data gradient. Each channel has its own filters, so
// that channels share nothing.
//
// Bytes      image in, result out, once each; overlapping windows are read from registers or from the cache.
// Tile       a thread computes a small tile of output pixels of N neighbouring channels in registers (depthwise.cuh):
//            channels last 16 bytes of channels, channels first one channel and up to 8 x 2 pixels.
// Threads    256, along channels and down the tiles; blocks walk over tiles.
// Shared     channels last: the filters of the block's channels, transposed to [tap, channel].
// Registers  launch bounds: 3 blocks on a multiprocessor with one channel for each thread, 2 otherwise.
// Limit      memory bandwidth and index arithmetic, which is kept to 32 bits.
#include "depthwise.cuh"

namespace mbc {

// Channels of a thread, channels last.
template <typename T>
constexpr int DEPTHWISE_VECTOR = WIDTH<T>;

// Stores a tile; `pairs`: two pixels of one channel are adjacent and aligned.
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

// The filters [channels, K, K] of a block's channels, transposed so that a thread reads N channels of a tap as a
// vector.
template <int N, int K>
struct BlockFilters {
  Vec<float, N> taps[K * K * 32];

  // Run by all threads of the block, ends with a barrier. `first`: the first of the block's channels.
  template <typename T>
  __device__ void stage(const T* w, int64_t first, int64_t channels) {
    const int count = static_cast<int>(min(static_cast<int64_t>(blockDim.x * N), channels - first)) * K * K;
    float* to = taps[0].v;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y)
      to[i % (K * K) * (blockDim.x * N) + i / (K * K)] = to_float(w[first * K * K + i]);
  }
  __device__ Vec<float, N> at(int tap) const { return taps[tap * blockDim.x + threadIdx.x]; }
};

// One channel for each thread: its filter is read from the cache.
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
    const T* plane = x + g.image.plane(at.outer, N > 1 ? k : k / g.depth_multiplier);
    if constexpr (N > 1)
      forward_tile<Size>(plane, shared, g, oy, ox, sum);
    else
      forward_tile<Size>(plane, ThreadFilter<T>{w + k * Size::K * Size::K}, g, oy, ox, sum);
    store_tile(sum, y + g.output.plane(at.outer, k), g.output, oy, ox, pairs);
  }
}

// Adds what the gradient `plane` contributes to image pixels at positions (v, u) of the stride and after.
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
    // The first positions are those that begin at or before the image's first pixels.
    const int32_t v = static_cast<int32_t>(at.middle) * Size::UP + g.pad_top / S;
    const int32_t u = static_cast<int32_t>(at.inner) * Size::ACROSS + g.pad_left / S;
    float sum[Size::UP * S][Size::ACROSS * S][N] = {};
    if constexpr (N > 1) {
      data_tile<Size>(dy + g.output.plane(at.outer, c), shared, g, v, u, sum);
    } else {
      for (int64_t k = c * g.depth_multiplier; k < (c + 1) * g.depth_multiplier; ++k)
        data_tile<Size>(dy + g.output.plane(at.outer, k), ThreadFilter<T>{w + k * Size::K * Size::K}, g, v, u, sum);
    }
    store_tile(sum, dx + g.image.plane(at.outer, c), g.image, v * S - g.pad_top, u * S - g.pad_left, pairs);
  }
}

// True if pairs of pixels of a line are aligned.
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
      const DepthwiseGrid grid(a.layout, a.channels * a.depth_multiplier, Size::N);
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
