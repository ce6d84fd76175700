// 1x1 convolutions to at most eight filters (a network's last layer), channels last, in every precision: forward, data
// gradient and filter gradient. They use FMA instead of tensor cores: with so few filters memory is the limit in any
// case.
//
// Bytes      forward: image in, result out. Data: gradient in, data gradient out. Filter: image and gradient in, a
//            partial filter gradient of each block out (split-K), which `add_parts` adds in order.
// Threads    256. Forward: four threads share a pixel, each takes every fourth 16 bytes of its channels; shuffles leave
//            each thread with one of four pixels. Data and filter: a thread keeps 16 bytes of channels and walks down
//            the pixels. A thread has four pixels in flight.
// Shared     forward: weights in fp32, [filters, channels]. Filter: one float of each thread for each of its channels.
// Registers  launch bounds: 4 blocks on a multiprocessor with up to two filters (3 in the filter pass), 2 with more.
// Limit      memory bandwidth.
#include "channels.cuh"
#include "stem_conv_filter.cuh"
#include "conv1x1_narrow_arguments.h"

namespace mbc {

constexpr int MOST_FILTERS = 8;  // equal to the constant in mbc/kernels/cuda/conv/conv1x1_narrow.py
constexpr int NARROW_PIXELS = 4;    // pixels of a thread whose loads are in flight at a time

struct Conv1x1Narrow {
  int64_t pixels;
  int32_t channels;
};

// A pixel of the output or its gradient: all filters.
template <typename T, int FILTERS>
struct OfPixel {
  static constexpr int WHOLE = FILTERS & -FILTERS;  // filters that are aligned together at any pixel
  static constexpr int PIECE = WHOLE < WIDTH<T> ? WHOLE : WIDTH<T>;
  Held<T, PIECE> pieces[FILTERS / PIECE];

  __device__ void load(const T* pixel) {
#pragma unroll
    for (int i = 0; i < FILTERS / PIECE; ++i) pieces[i] = hold<PIECE>(pixel + i * PIECE);
  }
  __device__ float operator[](int k) const { return to_float(pieces[k / PIECE][k % PIECE]); }
};

// The pixels of a thread that keeps a vector of channels: every `step`-th.
struct PixelsDown {
  int64_t pixel;
  int32_t channel, step, left;

  __device__ PixelsDown(const Conv1x1Narrow& f, int width)
      : pixel(static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y),
        channel(static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) * width),
        step(static_cast<int32_t>(gridDim.y * blockDim.y)), left(0) {
    if (channel < f.channels && pixel < f.pixels) left = static_cast<int32_t>((f.pixels - pixel - 1) / step + 1);
  }
  __device__ void advance() {
    pixel += NARROW_PIXELS * step;
    left -= NARROW_PIXELS;
  }
};

// Four threads share a pixel, each takes every fourth vector of it; a warp computes 32 pixels, each thread partial sums
// of four. Shuffles transpose and add these, so that each thread ends with one pixel.
template <typename T, int FILTERS>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 ? 2 : 4)
    conv1x1_narrow(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, Conv1x1Narrow f) {
  constexpr int N = WIDTH<T>, SHARERS = 4;
  static_assert(SHARERS == NARROW_PIXELS);
  MBC_DYNAMIC_SHARED(shared);
  float* weights = reinterpret_cast<float*>(shared);  // [FILTERS][channels]
  for (int i = threadIdx.x; i < FILTERS * f.channels; i += THREADS) weights[i] = to_float(weight[i]);
  __syncthreads();
  const int lane = threadIdx.x % 32, g = lane / SHARERS, t = lane % SHARERS;
  for (int64_t first = thread_index() - lane; first < f.pixels; first += thread_count()) {
    const T* from = x + first * f.channels;
    const int64_t last = f.pixels - 1 - first;  // the last pixel, which is read instead of pixels beyond it
    int32_t at[NARROW_PIXELS];
#pragma unroll
    for (int i = 0; i < NARROW_PIXELS; ++i) at[i] = static_cast<int32_t>(min(int64_t{8} * i + g, last)) * f.channels;
    float sums[NARROW_PIXELS][FILTERS] = {};
#pragma unroll 1
    for (int32_t c = t * N; c < f.channels; c += SHARERS * N) {
      Held<T, N> held[NARROW_PIXELS];
#pragma unroll
      for (int i = 0; i < NARROW_PIXELS; ++i) held[i] = hold<N>(from + at[i] + c);
#pragma unroll
      for (int j = 0; j < N; j += 4)
#pragma unroll
        for (int k = 0; k < FILTERS; ++k) {
          const Vec<float, 4> w = load<4>(weights + k * f.channels + c + j);
#pragma unroll
          for (int i = 0; i < NARROW_PIXELS; ++i)
#pragma unroll
            for (int h = 0; h < 4; ++h) sums[i][k] += to_float(held[i][j + h]) * w.v[h];
        }
    }
    const int64_t pixel = first + 8 * t + g;
    float result[FILTERS];
#pragma unroll
    for (int k = 0; k < FILTERS; ++k) {
      float pair[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = sums[h][k], high = sums[2 + h][k];
        pair[h] = (t / 2 != 0 ? high : low) + __shfl_xor_sync(0xffffffffu, t / 2 != 0 ? low : high, 2);
      }
      result[k] = (t % 2 != 0 ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, t % 2 != 0 ? pair[0] : pair[1], 1);
    }
    if (pixel >= f.pixels) continue;
    constexpr int PIECE = OfPixel<T, FILTERS>::PIECE;
#pragma unroll
    for (int k = 0; k < FILTERS; k += PIECE)
      store_floats(y + pixel * FILTERS + k, reinterpret_cast<const float(&)[PIECE]>(result[k]));
  }
}

// A thread keeps the weights of its channels in registers and walks down the pixels.
template <typename T, int FILTERS>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 ? 2 : 4)
    conv1x1_narrow_data(const T* __restrict__ dy, const T* __restrict__ weight, T* __restrict__ dx, Conv1x1Narrow f) {
  constexpr int N = WIDTH<T>;
  PixelsDown at(f, N);
  if (at.left == 0) return;
  Held<T, N> w[FILTERS];
#pragma unroll
  for (int k = 0; k < FILTERS; ++k) w[k] = hold<N>(weight + k * f.channels + at.channel);
  for (; at.left > 0; at.advance()) {
    const T* from = dy + at.pixel * FILTERS;
    T* to = dx + at.pixel * f.channels + at.channel;
    OfPixel<T, FILTERS> gradient[NARROW_PIXELS];
#pragma unroll
    for (int i = 0; i < NARROW_PIXELS; ++i)
      if (i < at.left) gradient[i].load(from + i * at.step * FILTERS);
#pragma unroll
    for (int i = 0; i < NARROW_PIXELS; ++i)
      if (i < at.left) {
        float result[N] = {};
#pragma unroll
        for (int k = 0; k < FILTERS; ++k)
#pragma unroll
          for (int j = 0; j < N; ++j) result[j] += gradient[i][k] * to_float(w[k][j]);
        store_floats(to + i * at.step * f.channels, result);
      }
  }
}

// A thread accumulates its channels and walks down the pixels; the sums of a block are then added in order.
template <typename T, int FILTERS>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 ? 2 : 3)
    conv1x1_narrow_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial,
                          Conv1x1Narrow f) {
  constexpr int N = WIDTH<T>;
  __shared__ float shared[N][THREADS];
  float sums[FILTERS][N] = {};
  for (PixelsDown at(f, N); at.left > 0; at.advance()) {
    const T *of_image = x + at.pixel * f.channels + at.channel, *of_gradients = dy + at.pixel * FILTERS;
    Held<T, N> held[NARROW_PIXELS];
    OfPixel<T, FILTERS> gradient[NARROW_PIXELS];
#pragma unroll
    for (int i = 0; i < NARROW_PIXELS; ++i)
      if (i < at.left) {
        held[i] = hold<N>(of_image + i * at.step * f.channels);
        gradient[i].load(of_gradients + i * at.step * FILTERS);
      }
#pragma unroll
    for (int i = 0; i < NARROW_PIXELS; ++i)
      if (i < at.left) {
#pragma unroll
        for (int k = 0; k < FILTERS; ++k)
#pragma unroll
          for (int j = 0; j < N; ++j) sums[k][j] += gradient[i][k] * to_float(held[i][j]);
      }
  }
  const int32_t first = static_cast<int32_t>(blockIdx.x * blockDim.x) * N;
  const unsigned threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < FILTERS; ++k) {
    __syncthreads();  // the sums of the filter before this one have been read
#pragma unroll
    for (int j = 0; j < N; ++j) shared[j][thread] = sums[k][j];
    __syncthreads();
#pragma unroll 1
    for (unsigned i = thread; i < N * blockDim.x; i += threads) {
      const unsigned across = i / N, j = i % N;
      float sum = 0.0f;
#pragma unroll 4
      for (unsigned down = 0; down < blockDim.y; ++down) sum += shared[j][down * blockDim.x + across];
      const int64_t part_row = static_cast<int64_t>(blockIdx.y) * f.channels + first + i;
      if (first + static_cast<int32_t>(i) < f.channels) partial[part_row * FILTERS + k] = sum;
    }
  }
}

// Calls `run` with the number of filters as a compile-time constant.
template <int FILTERS = 1, typename Run>
void for_filters(int64_t filters, Run run) {
  if (filters == FILTERS)
    run(std::integral_constant<int, FILTERS>{});
  else if constexpr (FILTERS < MOST_FILTERS)
    for_filters<FILTERS + 1>(filters, run);
}

// Calls `run` with an element, the number of filters and the sizes. Returns an error for other numbers of filters, for
// which no kernel is compiled.
template <typename Run>
const char* for_type_and_filters(const MbcCall& call, const Run& run) {
  const auto& a = arguments<Conv1x1NarrowArguments>(call);
  if (a.filters < 1 || a.filters > MOST_FILTERS) return "there are more than eight filters, or none";
  if (const char* problem = unaligned(call)) return problem;
  const Conv1x1Narrow f{a.pixels, static_cast<int32_t>(a.channels)};
  MBC_FOR_TYPE(a.type, T, { for_filters(a.filters, [&](auto count) { run(T(), count, f); }); });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1_narrow(const MbcCall& call) {
  using namespace mbc;
  return for_type_and_filters(call, [&](auto element, auto count, const Conv1x1Narrow& f) {
    using T = decltype(element);
    constexpr int FILTERS = decltype(count)::value;
    const int shared_bytes = FILTERS * f.channels * static_cast<int>(sizeof(float));
    const int64_t most = resident_blocks(conv1x1_narrow<T, FILTERS>, THREADS, shared_bytes);
    const auto blocks = static_cast<unsigned>(min(divide_up(f.pixels, THREADS), most));
    MBC_LAUNCH_SHARED((conv1x1_narrow<T, FILTERS>), blocks, THREADS, shared_bytes, call.stream, in<T>(call, 0),
                      in<T>(call, 1), out<T>(call, 2), f);
  });
}

extern "C" const char* mbc_conv1x1_narrow_backward_data(const MbcCall& call) {
  using namespace mbc;
  return for_type_and_filters(call, [&](auto element, auto count, const Conv1x1Narrow& f) {
    using T = decltype(element);
    const ChannelTiling tiling(f.channels / WIDTH<T>);
    const int64_t wanted = divide_up(f.pixels, tiling.threads_y() * NARROW_PIXELS);
    const int64_t most = multiprocessors() * 4 * MAP_WAVES / tiling.columns;
    const dim3 grid(tiling.columns, static_cast<unsigned>(min(wanted, max(int64_t{1}, most))));
    MBC_LAUNCH((conv1x1_narrow_data<T, decltype(count)::value>), grid, dim3(tiling.threads_x, tiling.threads_y()), call.stream,
               in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), f);
  });
}

extern "C" const char* mbc_conv1x1_narrow_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<Conv1x1NarrowArguments>(call);
  return for_type_and_filters(call, [&](auto element, auto count, const Conv1x1Narrow& f) {
    using T = decltype(element);
    float* partial = out<float>(call, 3);
    const ChannelTiling tiling(f.channels / WIDTH<T>);
    const dim3 grid(tiling.columns, static_cast<unsigned>(a.parts));
    MBC_LAUNCH((conv1x1_narrow_filter<T, decltype(count)::value>), grid, dim3(tiling.threads_x, tiling.threads_y()), call.stream,
               in<T>(call, 0), in<T>(call, 1), partial, f);
    FilterParts(f.channels, narrow(a.filters)).add(call, partial, a.parts, a.accumulate != 0);
  });
}
