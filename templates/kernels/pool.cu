// Maximum and average pooling. The gradients gather: every input pixel looks at the windows that hold it, so that no
// two threads write one element and the order of the sums is fixed.
#include "mbc_batch_norm.cuh"
#include "mbc_images.cuh"

struct PoolArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t out_height;
  int64_t out_width;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t stride_height;
  int64_t stride_width;
  int64_t pad_top;
  int64_t pad_bottom;
  int64_t pad_left;
  int64_t pad_right;
  int64_t option;  // max_pool: an index is written; avg_pool: padding counts
};

namespace mbc {

// Division by what is not known when compiling, as a multiplication ("Division by Invariant Integers using
// Multiplication", Granlund and Montgomery, 1994): exact where the product of the two is below 2^32, as it is for a
// coordinate and a stride.
struct Divider {
  uint32_t reciprocal;  // 2^32 over the divisor, rounded up; 0 for 1

  explicit Divider(int64_t by) : reciprocal(by == 1 ? 0 : static_cast<uint32_t>(((int64_t{1} << 32) + by - 1) / by)) {}
  __device__ int32_t divide(int32_t a) const {
    return reciprocal == 0 ? a : static_cast<int32_t>(static_cast<uint64_t>(a) * reciprocal >> 32);
  }
};

struct Window {
  Image input, output;
  Divider by_stride_height, by_stride_width;
  int32_t kernel_height, kernel_width, stride_height, stride_width, pad_top, pad_bottom, pad_left, pad_right;

  explicit Window(const PoolArguments& a)
      : input(a.layout, a.channels, a.height, a.width),
        output(a.layout, a.channels, a.out_height, a.out_width),
        by_stride_height(a.stride_height),
        by_stride_width(a.stride_width),
        kernel_height(static_cast<int32_t>(a.kernel_height)),
        kernel_width(static_cast<int32_t>(a.kernel_width)),
        stride_height(static_cast<int32_t>(a.stride_height)),
        stride_width(static_cast<int32_t>(a.stride_width)),
        pad_top(static_cast<int32_t>(a.pad_top)),
        pad_bottom(static_cast<int32_t>(a.pad_bottom)),
        pad_left(static_cast<int32_t>(a.pad_left)),
        pad_right(static_cast<int32_t>(a.pad_right)) {}

  // Input rows [first, last) under output row y that are not padding; the same for columns.
  __device__ int32_t top(int32_t y) const { return max(0, y * stride_height - pad_top); }
  __device__ int32_t bottom(int32_t y) const {
    return min(static_cast<int32_t>(input.height), y * stride_height - pad_top + kernel_height);
  }
  __device__ int32_t left(int32_t x) const { return max(0, x * stride_width - pad_left); }
  __device__ int32_t right(int32_t x) const {
    return min(static_cast<int32_t>(input.width), x * stride_width - pad_left + kernel_width);
  }
  // Output rows [first, last) whose windows hold input row y; the same for columns.
  __device__ int32_t first_row(int32_t y) const {
    const int32_t reach = y + pad_top - kernel_height;
    return reach < 0 ? 0 : by_stride_height.divide(reach) + 1;
  }
  __device__ int32_t last_row(int32_t y) const {
    return min(static_cast<int32_t>(output.height), by_stride_height.divide(y + pad_top) + 1);
  }
  __device__ int32_t first_column(int32_t x) const {
    const int32_t reach = x + pad_left - kernel_width;
    return reach < 0 ? 0 : by_stride_width.divide(reach) + 1;
  }
  __device__ int32_t last_column(int32_t x) const {
    return min(static_cast<int32_t>(output.width), by_stride_width.divide(x + pad_left) + 1);
  }
  // What the sum of a window is divided by. With `count_pad` padding counts, but not what lies beyond it.
  __device__ float size(int32_t y, int32_t x, bool count_pad) const {
    if (!count_pad) return static_cast<float>((bottom(y) - top(y)) * (right(x) - left(x)));
    const int32_t above = y * stride_height - pad_top, before = x * stride_width - pad_left;
    const int32_t down = min(static_cast<int32_t>(input.height) + pad_bottom, above + kernel_height) - above;
    const int32_t across = min(static_cast<int32_t>(input.width) + pad_right, before + kernel_width) - before;
    return static_cast<float>(down * across);
  }
};

struct AsItIs {
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float operator()(const Channel&, float x, float) const { return x; }
};

// Of what F makes of each element.
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
            // The first of equals wins; a NaN wins over everything before it.
            if (value > best[j] || isnan(value)) best[j] = value, where[j] = static_cast<uint8_t>(position + k);
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

template <typename T>
struct MaxPoolBackward {
  const uint8_t* index;
  const T* dy;
  T* dx;
  Window window;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    constexpr int K = 2;  // windows read at once: more seldom hold one column
    float sum[N] = {};
    const int32_t first = window.first_column(p.x), last = window.last_column(p.x);
    for (int32_t r = window.first_row(p.y); r < window.last_row(p.y); ++r)
      for (int32_t s = first; s < last; s += K) {
        const int64_t from = window.output.at(p.n, p.c, r, s);
        Vec<uint8_t, N> where[K];
        Vec<T, N> v[K];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (s + k < last) {
            where[k] = load<N>(index + from + k * window.output.x_stride);
            v[k] = load<N>(dy + from + k * window.output.x_stride);
          }
        const int32_t position = (p.y - (r * window.stride_height - window.pad_top)) * window.kernel_width + p.x -
                                 (s * window.stride_width - window.pad_left);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (s + k >= last) break;
#pragma unroll
          for (int j = 0; j < N; ++j)
            if (where[k].v[j] == position - k * window.stride_width) sum[j] += to_float(v[k].v[j]);
        }
      }
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j]);
    store(dx + at, result);
  }
};

template <typename T>
struct AveragePool {
  const T* x;
  T* y;
  Window window;
  bool count_pad;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    for (int32_t r = window.top(p.y); r < window.bottom(p.y); ++r)
      for (int32_t s = window.left(p.x); s < window.right(p.x); ++s) {
        const Vec<T, N> v = load<N>(x + window.input.at(p.n, p.c, r, s));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += to_float(v.v[j]);
      }
    const float size = window.size(p.y, p.x, count_pad);
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j] / size);
    store(y + at, result);
  }
};

template <typename T>
struct AveragePoolBackward {
  const T* dy;
  T* dx;
  Window window;
  bool count_pad;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    for (int32_t r = window.first_row(p.y); r < window.last_row(p.y); ++r)
      for (int32_t s = window.first_column(p.x); s < window.last_column(p.x); ++s) {
        const float share = 1.0f / window.size(r, s, count_pad);
        const Vec<T, N> v = load<N>(dy + window.output.at(p.n, p.c, r, s));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = fmaf(to_float(v.v[j]), share, sum[j]);
      }
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j]);
    store(dx + at, result);
  }
};

// One window over the whole image: a sum over `inner` positions. Channels first, a warp a plane; channels last, a
// block a tile of channels.
template <typename T>
__global__ void mean_planes(const T* x, T* y, int64_t planes, int64_t inner) {
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  float sum = 0.0f;
  if (plane < planes)
    for (int64_t s = threadIdx.x; s < inner; s += 32) sum += to_float(x[plane * inner + s]);
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (plane < planes && threadIdx.x == 0) y[plane] = from_float<T>(sum / static_cast<float>(inner));
}

template <typename T>
__global__ void mean_pixels(const T* x, T* y, int64_t channels, int64_t inner) {
  __shared__ float shared[8][32];
  const int64_t c = static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x, n = blockIdx.x;
  float sum = 0.0f;
  if (c < channels)
    for (int64_t s = threadIdx.y; s < inner; s += 8) sum += to_float(x[(n * inner + s) * channels + c]);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && c < channels) {
    for (int i = 1; i < 8; ++i) sum += shared[i][threadIdx.x];
    y[n * channels + c] = from_float<T>(sum / static_cast<float>(inner));
  }
}

// `output`: which pointer is the pooled image; the index follows it.
template <typename F>
const char* max_pool(const MbcCall& call, int output, F f) {
  const auto& a = arguments<PoolArguments>(call);
  uint8_t* index = a.option ? out<uint8_t>(call, output + 1) : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, output);
    const bool wide = aligned(x, 16) && aligned(y, 16) && aligned(index, WIDTH<T>);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, a.out_height, a.out_width), wide,
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
extern "C" const char* mbc_batch_normalize_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  const bool affine = call.integers[sizeof(PoolArguments) / sizeof(int64_t)] != 0;
  return max_pool(call, affine ? 5 : 3, NormalizeRelu{normalize(call, 1, affine, eps(call, 0))});
}

extern "C" const char* mbc_max_pool_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const uint8_t* index = in<uint8_t>(call, 0);
    const T* dy = in<T>(call, 1);
    T* dx = out<T>(call, 2);
    const bool wide = aligned(dy, 16) && aligned(dx, 16) && aligned(index, WIDTH<T>);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, a.height, a.width), wide,
                             MaxPoolBackward<T>{index, dy, dx, Window(a)});
  });
  return launched();
}

extern "C" const char* mbc_avg_pool(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  const int64_t inner = a.height * a.width;
  const bool whole = a.kernel_height == a.height && a.kernel_width == a.width && a.out_height * a.out_width == 1 &&
                     a.pad_top + a.pad_bottom + a.pad_left + a.pad_right == 0;
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 1);
    if (whole && a.layout == MBC_CHANNELS_FIRST) {
      MBC_LAUNCH((mean_planes<T>), static_cast<unsigned>(divide_up(a.rows * a.channels, 8)), dim3(32, 8), call.stream,
                 x, y, a.rows * a.channels, inner);
    } else if (whole) {
      const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(divide_up(a.channels, 32)));
      MBC_LAUNCH((mean_pixels<T>), grid, dim3(32, 8), call.stream, x, y, a.channels, inner);
    } else {
      for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, a.out_height, a.out_width),
                               aligned(x, 16) && aligned(y, 16), AveragePool<T>{x, y, Window(a), a.option != 0});
    }
  });
  return launched();
}

extern "C" const char* mbc_avg_pool_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* dy = in<T>(call, 0);
    T* dx = out<T>(call, 1);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, a.height, a.width),
                             aligned(dy, 16) && aligned(dx, 16), AveragePoolBackward<T>{dy, dx, Window(a), a.option != 0});
  });
  return launched();
}
