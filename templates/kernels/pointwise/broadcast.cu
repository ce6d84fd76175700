// An image and a gate, one number for each channel of each sample: products and sums, in place or not, and the sums
// over pixels that are the gradients of the gate. Squeeze-excitation multiplies an image by a gate that follows from
// the means of the image; the gradients along both paths are added in one pass.
//
// Bytes      images in and out once; gates are read from the cache.
// Threads    maps: 256 in a grid-stride loop, 16 bytes at a time if operands are aligned. Sums: with channels first a
//            warp for each plane; with channels last a block for up to 32 vectors of channels of a sample, whose pixels
//            are dealt out to the rows of threads. Their sums are added in a fixed order.
// Limit      memory bandwidth.
#include "channels.cuh"
#include "images.cuh"
#include "image_arguments.h"
#include "broadcast_operands.h"

namespace mbc {

// An element, its gate, and a second gate if there is one.
struct TimesGate {
  static constexpr bool TWO = false;
  __device__ float operator()(float x, float gate, float = 0.0f) const { return x * gate; }
};
struct PlusGate {
  static constexpr bool TWO = false;
  __device__ float operator()(float x, float gate, float) const { return x + gate; }
};
struct TimesGatePlusMean {
  static constexpr bool TWO = true;
  float share;  // share of a pixel in a mean
  __device__ float operator()(float x, float gate, float of_mean) const { return fmaf(of_mean, share, x * gate); }
};
struct FirstOf {
  __device__ float operator()(float x, float) const { return x; }
};

// Channels first: a plane is a channel of one sample.
template <typename T, typename F>
struct GatePlanes {
  struct Channel {
    float gate, second;
  };
  const T *gate, *second;
  F f;
  __device__ Channel load(int64_t plane) const {
    return {to_float(gate[plane]), F::TWO ? to_float(second[plane]) : 0.0f};
  }
  __device__ float operator()(const Channel& c, float x, float) const { return f(x, c.gate, c.second); }
};

// Channels last.
template <typename T, typename F>
struct GatePixels {
  const T *x, *gate, *second;
  T* y;
  int64_t channels;
  F f;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    Vec<T, N> v = load<N>(x + at);
    const Vec<T, N> g = load<N>(gate + p.n * channels + p.c);
    Vec<T, N> s = g;
    if constexpr (F::TWO) s = load<N>(second + p.n * channels + p.c);
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(f(to_float(v.v[j]), to_float(g.v[j]), to_float(s.v[j])));
    store(y + at, v);
  }
};

template <typename F>
const char* run_gate(const MbcCall& call, const BroadcastOperands& at, F f) {
  const auto& a = arguments<ImageArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T *x = at.x, *gate = at.gate, *second = F::TWO ? at.mean : at.gate;
    T* y = at.y;
    const bool wide = aligned(x, 16) && aligned(y, 16);
    constexpr int N = WIDTH<T>;
    if (a.layout == MBC_CHANNELS_LAST) {
      for_each_pixel<N>(call.stream, a.layout, a.rows, Image(a.layout, a.channels, 1, a.inner),
                        wide && aligned(gate, 16) && aligned(second, 16),
                        GatePixels<T, F>{x, gate, second, y, a.channels, f});
    } else {
      map_channels<0>(call.stream, a.layout, 1, a.rows * a.channels, a.inner, Operands<T>{x, nullptr}, y,
                      GatePlanes<T, F>{gate, second, f});
    }
  });
  return launched();
}

// A warp for each plane.
template <typename T, int N, typename F>
__global__ void sum_planes(const T* a, const T* b, T* y, int64_t planes, int64_t vectors, F f) {
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  float sum = 0.0f;
  if (plane < planes) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < vectors; i += 32) {
      const int64_t at = (plane * vectors + i) * N;
      const Vec<T, N> u = load<N>(a + at), v = load<N>(b + at);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += f(to_float(u.v[j]), to_float(v.v[j]));
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (plane < planes && threadIdx.x == 0) y[plane] = from_float<T>(sum);
}

// A block for each tile of channels of one sample.
template <typename T, int N, typename F>
__global__ void sum_pixels(const T* a, const T* b, T* y, int64_t channels, int64_t inner, F f) {
  __shared__ float shared[THREADS * N];
  const unsigned tile = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t n = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * tile, c = first + threadIdx.x * N;
  float sum[N] = {};
  if (c < channels) {
#pragma unroll 4
    for (int64_t s = threadIdx.y; s < inner; s += blockDim.y) {
      const int64_t at = (n * inner + s) * channels + c;
      const Vec<T, N> u = load<N>(a + at), v = load<N>(b + at);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += f(to_float(u.v[j]), to_float(v.v[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) shared[thread * N + j] = sum[j];
  __syncthreads();
  // A tile has no more channels than a block has threads.
  if (thread < tile && first + thread < channels) {
    float total = 0.0f;
    for (unsigned i = 0; i < blockDim.y; ++i) total += shared[i * tile + thread];
    y[n * channels + first + thread] = from_float<T>(total);
  }
}

template <typename T, int N, typename F>
void run_pixel_sums(const MbcCall& call, const ImageArguments& a, const T* x, const T* z, T* y, F f) {
  if (a.layout == MBC_CHANNELS_LAST) {
    const Tiling tiling(a.channels / N);
    const dim3 grid(static_cast<unsigned>(a.rows), tiling.columns), block(tiling.threads_x, tiling.threads_y());
    MBC_LAUNCH((sum_pixels<T, N, F>), grid, block, call.stream, x, z, y, a.channels, a.inner, f);
  } else {
    const int64_t planes = a.rows * a.channels;
    MBC_LAUNCH((sum_planes<T, N, F>), static_cast<unsigned>(divide_up(planes, 8)), dim3(32, 8), call.stream, x, z, y,
               planes, a.inner / N, f);
  }
}

// Sums f of the elements of x and z over the pixels of each channel of each sample; without z, of x alone.
template <typename F>
const char* pixel_sums(const MbcCall& call, const BroadcastOperands& at, F f) {
  const auto& a = arguments<ImageArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T *x = at.x, *z = at.z.pointer == nullptr ? at.x : at.z;
    T* y = at.y;
    const int64_t adjacent = a.layout == MBC_CHANNELS_LAST ? a.channels : a.inner;
    by_vectors<WIDTH<T>>(adjacent % WIDTH<T> == 0 && aligned(x, 16) && aligned(z, 16),
                         [&](auto n) { run_pixel_sums<T, n>(call, a, x, z, y, f); });
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_broadcast_mul(const MbcCall& call) {
  return mbc::run_gate(call, mbc::operands_of_broadcast_mul(call), mbc::TimesGate{});
}
extern "C" const char* mbc_broadcast_add(const MbcCall& call) {
  return mbc::run_gate(call, mbc::operands_of_broadcast_add(call), mbc::PlusGate{});
}
extern "C" const char* mbc_broadcast_mul_add_mean_gradient(const MbcCall& call) {
  const float pixels = static_cast<float>(mbc::arguments<ImageArguments>(call).inner);
  const auto at = mbc::operands_of_broadcast_mul_add_mean_gradient(call);
  return mbc::run_gate(call, at, mbc::TimesGatePlusMean{1.0f / pixels});
}
extern "C" const char* mbc_pixel_sum(const MbcCall& call) {
  return mbc::pixel_sums(call, mbc::operands_of_pixel_sum(call), mbc::FirstOf{});
}
extern "C" const char* mbc_pixel_dot(const MbcCall& call) {
  return mbc::pixel_sums(call, mbc::operands_of_pixel_dot(call), mbc::TimesGate{});
}
