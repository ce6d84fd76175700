// Average pooling and its gradient, which gathers: every input pixel reads the windows that contain it, so that no two
// threads write one element and the order of additions is fixed.
//
// Bytes      image in, result out; overlapping windows read from the cache.
// Threads    256 in a grid-stride loop over output elements: with channels last 16 bytes of channels of a pixel each, with
//            channels first one element (images.cuh).
// Limit      memory bandwidth; with channels first index arithmetic.
#include "pool.cuh"

namespace mbc {

template <typename T, bool ANY>
struct AveragePool {
  const T* x;
  T* y;
  Window window;
  bool count_pad;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    window.each_pixel<ANY>(p, [&](int32_t, int64_t from) {
      const Vec<T, N> v = load<N>(x + from);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += to_float(v.v[j]);
    });
    const float size = window.size<ANY>(p.y, p.x, count_pad);
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j] / size);
    store(y + at, result);
  }
};

template <typename T, bool ANY>
struct AveragePoolBackward {
  const T* dy;
  T* dx;
  Window window;
  bool count_pad;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    window.each_window<ANY>(p, [&](int32_t, int32_t r, int32_t s) {
      const float share = 1.0f / window.size<ANY>(r, s, count_pad);
      const Vec<T, N> v = load<N>(dy + window.output.at(p.n, p.c, r, s));
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = fmaf(to_float(v.v[j]), share, sum[j]);
    });
    store_floats(dx + at, sum);
  }
};

// One window over the whole image: a sum over `inner` positions. Channels first: a warp for each plane. Channels last:
// a block for each tile of channels.
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

}  // namespace mbc

extern "C" const char* mbc_avg_pool(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  const int64_t inner = a.depth * a.height * a.width;
  const bool whole = a.kernel_depth * a.kernel_height * a.kernel_width == inner && a.out_depth * a.out_height * a.out_width == 1 &&
                     a.pad_front + a.pad_back + a.pad_top + a.pad_bottom + a.pad_left + a.pad_right == 0;
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
      constexpr int N = WIDTH<T>;
      const Window window(a);
      const bool wide = aligned(x, 16) && aligned(y, 16);
      const auto run = [&](auto f) { for_each_pixel<N>(call.stream, a.layout, a.rows, window.output, wide, f); };
      if (a.any)
        run(AveragePool<T, true>{x, y, window, a.option != 0});
      else
        run(AveragePool<T, false>{x, y, window, a.option != 0});
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
    constexpr int N = WIDTH<T>;
    const Window window(a);
    const bool wide = aligned(dy, 16) && aligned(dx, 16);
    const auto run = [&](auto f) { for_each_pixel<N>(call.stream, a.layout, a.rows, window.input, wide, f); };
    if (a.any)
      run(AveragePoolBackward<T, true>{dy, dx, window, a.option != 0});
    else
      run(AveragePoolBackward<T, false>{dy, dx, window, a.option != 0});
  });
  return launched();
}
