// Maximum pooling of an image as it is, or of what a bias, a batch normalisation or relu makes of it on the way.
//
// Of equal elements the first one wins, in the order of rows and then of columns; a NaN wins over everything before it.
#include "mbc_batch_norm.cuh"
#include "mbc_channel_sum.cuh"
#include "mbc_pool.cuh"

namespace mbc {

struct AsItIs {
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float operator()(const Channel&, float x, float) const { return x; }
};

struct ReluAlone {
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float operator()(const Channel&, float x, float) const { return relu(x); }
};

__device__ inline bool wins(float value, float over) { return value > over || isnan(value); }

// Windows of any size.
template <typename T, typename F>
struct MaxPool {
  const T* x;
  T* y;
  uint8_t* index;  // null: not wanted
  Window window;
  F f;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    constexpr int K = 4;  // columns read at once
    const int32_t above = p.y * window.stride_height - window.pad_top;
    const int32_t before = p.x * window.stride_width - window.pad_left;
    const int32_t top = window.top(p.y), left = window.left(p.x), right = window.right(p.x);
    typename F::Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = f.load(p.c + j);
    float best[N];
    uint8_t where[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      best[j] = -INFINITY;
      where[j] = static_cast<uint8_t>((top - above) * window.kernel_width + left - before);
    }
    for (int32_t r = top; r < window.bottom(p.y); ++r)
      for (int32_t s = left; s < right; s += K) {
        const int64_t from = window.input.at(p.n, p.c, r, s);
        Vec<T, N> v[K];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (s + k < right) v[k] = load<N>(x + from + k * window.input.x_stride);
        const int32_t position = (r - above) * window.kernel_width + s - before;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (s + k >= right) break;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float value = f(channel[j], to_float(v[k].v[j]), 0.0f);
            if (wins(value, best[j])) best[j] = value, where[j] = static_cast<uint8_t>(position + k);
          }
        }
      }
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(best[j]);
    store(y + at, result);
    if (index != nullptr) {
      Vec<uint8_t, N> positions;
#pragma unroll
      for (int j = 0; j < N; ++j) positions.v[j] = where[j];
      store(index + at, positions);
    }
  }
};

// The best so far of N channels, and where it was.
template <int N>
struct Best {
  float value[N];
  int32_t where[N];

  __device__ explicit Best(int32_t start = 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = -INFINITY, where[j] = start;
  }
  // What another one found later, `offset` positions further on.
  __device__ void take(const Best& later, int32_t offset) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (wins(later.value[j], value[j])) value[j] = later.value[j], where[j] = later.where[j] + offset;
  }
  template <typename T, typename F>
  __device__ void take(const Vec<T, N>& v, const F& f, const typename F::Channel (&channel)[N], int32_t position) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float element = f(channel[j], to_float(v.v[j]), 0.0f);
      if (wins(element, value[j])) value[j] = element, where[j] = position;
    }
  }
};

// Windows of size S, channels last, N channels a thread. A row that windows share is searched once for all of them.
template <typename T, int N, typename S, typename F>
__global__ void __launch_bounds__(THREADS, 2)
    max_pool_strips(const T* __restrict__ x, T* __restrict__ y, uint8_t* __restrict__ index, Window window,
                    Strips strips, F f) {
  constexpr int G = S::CARRIED == 0 ? 2 : 1;  // windows one below the other: six or eight vectors on their way
  constexpr int FRESH = G * S::STRIDE_HEIGHT, KEPT = S::CARRIED == 0 ? 1 : S::CARRIED;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  const int64_t channels = window.input.channels;
  if (item >= strips.count || c >= channels) return;
  const Strip strip(strips, item);
  typename F::Channel channel[N];
#pragma unroll
  for (int j = 0; j < N; ++j) channel[j] = f.load(c + j);

  const int32_t height = static_cast<int32_t>(window.input.height), width = static_cast<int32_t>(window.input.width);
  const int32_t before = strip.column * S::STRIDE_WIDTH - window.pad_left;
  const int64_t line = window.input.y_stride;
  bool inside[S::KERNEL_WIDTH];
#pragma unroll
  for (int s = 0; s < S::KERNEL_WIDTH; ++s) inside[s] = before + s >= 0 && before + s < width;
  int32_t r = strip.first * S::STRIDE_HEIGHT - window.pad_top;
  const T* from = x + strip.n * window.input.n_stride + r * line + before * channels + c;

  const auto there = [&](int32_t row) { return row >= 0 && row < height; };
  const auto fetch = [&](Vec<T, N>(&v)[S::KERNEL_WIDTH], int i) {
#pragma unroll
    for (int s = 0; s < S::KERNEL_WIDTH; ++s)
      if (there(r + i) && inside[s]) v[s] = load<N>(from + i * line + s * channels);
  };
  const auto search = [&](Best<N>& best, const Vec<T, N>(&v)[S::KERNEL_WIDTH], int i, int32_t position) {
#pragma unroll
    for (int s = 0; s < S::KERNEL_WIDTH; ++s)
      if (there(r + i) && inside[s]) best.take(v[s], f, channel, position + s);
  };

  Best<N> carried[KEPT];  // of rows, by columns
#pragma unroll
  for (int i = 0; i < S::CARRIED; ++i) {
    Vec<T, N> v[S::KERNEL_WIDTH];
    fetch(v, i);
    search(carried[i], v, i, 0);
  }
  int64_t to = (strip.n * window.output.height + strip.first) * window.output.y_stride + strip.column * channels + c;
  for (int32_t left = strip.last - strip.first; left > 0; left -= G, r += FRESH, from += FRESH * line) {
    Vec<T, N> v[FRESH][S::KERNEL_WIDTH];
#pragma unroll
    for (int i = 0; i < FRESH; ++i) fetch(v[i], S::CARRIED + i);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (g >= left) break;
      // Where all is as low as can be the first pixel wins.
      const int32_t above = r + g * S::STRIDE_HEIGHT;
      Best<N> best(max(0, -above) * S::KERNEL_WIDTH + max(0, -before));
#pragma unroll
      for (int i = 0; i < S::CARRIED; ++i) best.take(carried[i], i * S::KERNEL_WIDTH);
#pragma unroll
      for (int i = 0; i + 1 < S::CARRIED; ++i) carried[i] = carried[i + 1];
#pragma unroll
      for (int i = S::CARRIED; i < S::KERNEL_HEIGHT; ++i) {
        const int fresh = g * S::STRIDE_HEIGHT + i - S::CARRIED;
        if constexpr (S::CARRIED == 0) {
          search(best, v[fresh], fresh, i * S::KERNEL_WIDTH);
        } else {
          Best<N> row(0);
          search(row, v[fresh], i, 0);
          best.take(row, i * S::KERNEL_WIDTH);
          if (i + 1 == S::KERNEL_HEIGHT) carried[S::CARRIED - 1] = row;
        }
      }
      Vec<T, N> result;
      Vec<uint8_t, N> where;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        result.v[j] = from_float<T>(best.value[j]);
        where.v[j] = static_cast<uint8_t>(best.where[j]);
      }
      store(y + to, result);
      if (index != nullptr) store(index + to, where);
      to += window.output.y_stride;
    }
  }
}

// `output`: which pointer is the pooled image; the index follows it.
template <typename F>
const char* max_pool(const MbcCall& call, int output, F f) {
  const auto& a = arguments<PoolArguments>(call);
  uint8_t* index = a.option ? out<uint8_t>(call, output + 1) : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    constexpr int N = WIDTH<T>;
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, output);
    const bool wide = aligned(x, 16) && aligned(y, 16) && aligned(index, N) && a.channels % N == 0;
    const bool done = wide && a.layout == MBC_CHANNELS_LAST && for_usual_window(a, [&](auto size) {
      using S = decltype(size);
      const Strips strips(a.channels / N, a.rows, a.out_width, a.out_height, 16, 2, MANY_THREADS / (a.channels / N));
      const dim3 grid(static_cast<unsigned>(divide_up(strips.count, strips.down)), strips.tiles);
      MBC_LAUNCH((max_pool_strips<T, N, S, F>), grid, dim3(strips.along, strips.down), call.stream, x, y, index,
                 Window(a), strips, f);
    });
    if (!done)
      for_each_pixel<N>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, a.out_height, a.out_width), wide,
                        MaxPool<T, F>{x, y, index, Window(a), f});
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_max_pool(const MbcCall& call) {
  using namespace mbc;
  return max_pool(call, 1, AsItIs{});
}

// What the pool is of exists nowhere.
extern "C" const char* mbc_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  return max_pool(call, 1, ReluAlone{});
}

extern "C" const char* mbc_bias_add_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  return max_pool(call, 2, BiasRelu{in<float>(call, 1)});
}

extern "C" const char* mbc_batch_normalize_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  const bool affine = behind_pool(call, 0) != 0;
  return max_pool(call, affine ? 5 : 3, NormalizeRelu{normalize(call, 1, affine, eps(call, 0))});
}
