// Common parts of 1x1 convolutions to few filters: the gradients of a pixel, and the forward pass with a prologue.
#pragma once

#include "channels.cuh"

namespace mbc {

constexpr int NARROW_PIXELS = 4;  // pixels of a thread whose loads are in flight at a time

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

// The pixels of a thread that keeps a vector of channels: every `step`-th, `PIXELS` at a time.
template <int PIXELS = NARROW_PIXELS>
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
    pixel += PIXELS * step;
    left -= PIXELS;
  }
};

// What is fused with a convolution: nothing. In general, in a forward pass
//   TABLE_WORDS             words of shared memory for each channel, which `fill(table, channels)` writes
//   at(table, channels, c)  a function of an element of one of the channels c to c + 3, and of its channel less c
//   finish(k, sum)          the result of the k-th filter
// and in the other passes
//   channel_of(sample, channels, c)  constants of a channel
//   factors(channel, x, factors)     filter pass: the SUMS factors of an element by which a gradient is multiplied
//   gradient(channel, x, d)          data pass, if READS: the result, from a data gradient and the element of `x` there
struct NoNeighbours {
  static constexpr int TABLE_WORDS = 0, SUMS = 1;
  static constexpr bool READS = false;
  __device__ void fill(float*, int32_t) const {}
  __device__ auto at(const float*, int32_t, int32_t) const { return [](float x, int) { return x; }; }
  __device__ float finish(int, float sum) const { return sum; }

  struct Channel {};
  __device__ Channel channel_of(int64_t, int32_t, int32_t) const { return {}; }
  template <typename T>
  __device__ void factors(Channel, float x, float (&factors)[SUMS]) const { factors[0] = x; }
};

// Four threads share a pixel, each takes every fourth vector of it; a warp computes 32 pixels, each thread partial sums
// of four. Shuffles transpose and add these, so that each thread ends with one pixel.
template <typename T, int FILTERS, typename Neighbours>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 ? 2 : Neighbours::TABLE_WORDS > 0 ? 3 : 4)
    conv1x1_narrow(const T* __restrict__ images, const T* __restrict__ weight, T* __restrict__ results, Conv1x1Narrow f,
                   Neighbours neighbours) {
  constexpr int N = WIDTH<T>, SHARERS = 4;
  static_assert(SHARERS == NARROW_PIXELS);
  MBC_DYNAMIC_SHARED(shared);
  float* weights = reinterpret_cast<float*>(shared);  // [FILTERS][channels]
  float* table = weights + FILTERS * f.channels;
  for (int i = threadIdx.x; i < FILTERS * f.channels; i += THREADS) weights[i] = to_float(weight[i]);
  neighbours.fill(table, f.channels);
  __syncthreads();
  const T* const x = images + blockIdx.y * f.pixels * f.channels;  // of this sample
  T* const y = results + blockIdx.y * f.pixels * FILTERS;
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
      for (int j = 0; j < N; j += 4) {
        const auto of = neighbours.at(table, f.channels, c + j);
#pragma unroll
        for (int k = 0; k < FILTERS; ++k) {
          const Vec<float, 4> w = load<4>(weights + k * f.channels + c + j);
#pragma unroll
          for (int i = 0; i < NARROW_PIXELS; ++i)
#pragma unroll
            for (int h = 0; h < 4; ++h) sums[i][k] += of(to_float(held[i][j + h]), h) * w.v[h];
        }
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
      const float other = __shfl_xor_sync(0xffffffffu, t % 2 != 0 ? pair[0] : pair[1], 1);
      result[k] = neighbours.finish(k, (t % 2 != 0 ? pair[1] : pair[0]) + other);
    }
    if (pixel >= f.pixels) continue;
    constexpr int PIECE = OfPixel<T, FILTERS>::PIECE;
#pragma unroll
    for (int k = 0; k < FILTERS; k += PIECE)
      store_floats(y + pixel * FILTERS + k, reinterpret_cast<const float(&)[PIECE]>(result[k]));
  }
}

// `f`: pixels of a sample.
template <int FILTERS, typename T, typename Neighbours>
void run_conv1x1_narrow(cudaStream_t stream, const T* x, const T* weight, void* y, const Conv1x1Narrow& f,
                        const Neighbours& neighbours, int64_t samples = 1) {
  const auto kernel = conv1x1_narrow<T, FILTERS, Neighbours>;
  const int shared_bytes = (FILTERS + Neighbours::TABLE_WORDS) * f.channels * static_cast<int>(sizeof(float));
  const int64_t most = max(int64_t{1}, resident_blocks(kernel, THREADS, shared_bytes) / samples);
  const dim3 grid(static_cast<unsigned>(min(divide_up(f.pixels, THREADS), most)), static_cast<unsigned>(samples));
  MBC_LAUNCH_SHARED(kernel, grid, THREADS, shared_bytes, stream, x, weight, static_cast<T*>(y), f, neighbours);
}

// A thread keeps the weights of its channels in registers and walks down the pixels.
template <typename T, int FILTERS, typename Neighbours>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 ? 2 : Neighbours::READS ? 3 : 4)
    conv1x1_narrow_data(const T* __restrict__ gradients, const T* __restrict__ weight, T* __restrict__ results, Conv1x1Narrow f,
                        Neighbours neighbours) {
  constexpr int N = WIDTH<T>, PIXELS = Neighbours::READS ? 2 : NARROW_PIXELS;
  PixelsDown<PIXELS> at(f, N);
  if (at.left == 0) return;
  const int64_t sample = blockIdx.z;
  const T* const dy = gradients + sample * f.pixels * FILTERS;
  Held<T, N> w[FILTERS];
#pragma unroll
  for (int k = 0; k < FILTERS; ++k) w[k] = hold<N>(weight + k * f.channels + at.channel);
  typename Neighbours::Channel of[N];
#pragma unroll
  for (int j = 0; j < N; ++j) of[j] = neighbours.channel_of(sample, f.channels, at.channel + j);
  for (; at.left > 0; at.advance()) {
    const T* from = dy + at.pixel * FILTERS;
    const int64_t first = (sample * f.pixels + at.pixel) * f.channels + at.channel;
    OfPixel<T, FILTERS> gradient[PIXELS];
    Held<T, N> x[PIXELS];
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
      if (i < at.left) {
        gradient[i].load(from + i * at.step * FILTERS);
        if constexpr (Neighbours::READS) x[i] = hold<N>(neighbours.x + first + i * at.step * f.channels);
      }
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
      if (i < at.left) {
        float result[N] = {};
#pragma unroll
        for (int k = 0; k < FILTERS; ++k)
#pragma unroll
          for (int j = 0; j < N; ++j) result[j] += gradient[i][k] * to_float(w[k][j]);
        if constexpr (Neighbours::READS)
#pragma unroll
          for (int j = 0; j < N; ++j) result[j] = neighbours.gradient(of[j], to_float(x[i][j]), result[j]);
        store_floats(results + first + i * at.step * f.channels, result);
      }
  }
}

template <int FILTERS, typename T, typename Neighbours>
void run_conv1x1_narrow_data(cudaStream_t stream, const T* dy, const T* weight, void* dx, const Conv1x1Narrow& f,
                             const Neighbours& neighbours, int64_t samples = 1) {
  const ChannelTiling tiling(f.channels / WIDTH<T>);
  const int64_t wanted = divide_up(f.pixels, tiling.threads_y() * NARROW_PIXELS);
  const int64_t most = max(int64_t{1}, multiprocessors() * 4 * MAP_WAVES / (tiling.columns * samples));
  const dim3 grid(tiling.columns, static_cast<unsigned>(min(wanted, most)), static_cast<unsigned>(samples));
  MBC_LAUNCH((conv1x1_narrow_data<T, FILTERS, Neighbours>), grid, dim3(tiling.threads_x, tiling.threads_y()), stream, dy,
             weight, static_cast<T*>(dx), f, neighbours);
}

// A thread accumulates its channels and walks down the pixels; the sums of a block are then added in order. `partial` is
// [sample, part, channel, filter, sum].
template <typename T, int FILTERS, typename Neighbours>
__global__ void __launch_bounds__(THREADS, FILTERS > 2 || Neighbours::SUMS > 1 ? 2 : 3)
    conv1x1_narrow_filter(const T* __restrict__ images, const T* __restrict__ gradients, float* __restrict__ partial,
                          Conv1x1Narrow f, Neighbours neighbours) {
  constexpr int N = WIDTH<T>, SUMS = FILTERS * Neighbours::SUMS;
  __shared__ float shared[N][THREADS];
  const int64_t sample = blockIdx.z;
  const T *const x = images + sample * f.pixels * f.channels, *const dy = gradients + sample * f.pixels * FILTERS;
  float sums[SUMS][N] = {};
  PixelsDown<> at(f, N);
  typename Neighbours::Channel of[N];
#pragma unroll
  for (int j = 0; j < N; ++j) of[j] = neighbours.channel_of(sample, f.channels, min(at.channel + j, f.channels - 1));
  for (; at.left > 0; at.advance()) {
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
        for (int j = 0; j < N; ++j) {
          float factors[Neighbours::SUMS];
          neighbours.template factors<T>(of[j], to_float(held[i][j]), factors);
#pragma unroll
          for (int k = 0; k < SUMS; ++k) sums[k][j] += gradient[i][k / Neighbours::SUMS] * factors[k % Neighbours::SUMS];
        }
      }
  }
  const int32_t first = static_cast<int32_t>(blockIdx.x * blockDim.x) * N;
  const unsigned threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < SUMS; ++k) {
    __syncthreads();  // the sums before these have been read
#pragma unroll
    for (int j = 0; j < N; ++j) shared[j][thread] = sums[k][j];
    __syncthreads();
#pragma unroll 1
    for (unsigned i = thread; i < N * blockDim.x; i += threads) {
      const unsigned across = i / N, j = i % N;
      float sum = 0.0f;
#pragma unroll 4
      for (unsigned down = 0; down < blockDim.y; ++down) sum += shared[j][down * blockDim.x + across];
      const int64_t part_row = (sample * gridDim.y + blockIdx.y) * f.channels + first + i;
      if (first + static_cast<int32_t>(i) < f.channels) partial[part_row * SUMS + k] = sum;
    }
  }
}

template <int FILTERS, typename T, typename Neighbours>
void sum_conv1x1_narrow(cudaStream_t stream, const T* x, const T* dy, float* partial, int64_t parts, const Conv1x1Narrow& f,
                        const Neighbours& neighbours, int64_t samples = 1) {
  const ChannelTiling tiling(f.channels / WIDTH<T>);
  const dim3 grid(tiling.columns, static_cast<unsigned>(parts), static_cast<unsigned>(samples));
  MBC_LAUNCH((conv1x1_narrow_filter<T, FILTERS, Neighbours>), grid, dim3(tiling.threads_x, tiling.threads_y()), stream, x, dy,
             partial, f, neighbours);
}

// Calls `run` with the number of filters as a compile-time constant.
template <int MOST, int FILTERS = 1, typename Run>
void for_filters(int64_t filters, Run run) {
  if (filters == FILTERS)
    run(std::integral_constant<int, FILTERS>{});
  else if constexpr (FILTERS < MOST)
    for_filters<MOST, FILTERS + 1>(filters, run);
}

// Calls `run` with an element, the number of filters and the sizes. Returns an error for other numbers of filters, for
// which no kernel is compiled.
template <int MOST, typename Arguments, typename Run>
const char* for_type_and_filters(const MbcCall& call, const Arguments& a, const Run& run) {
  if (a.filters < 1 || a.filters > MOST) return "there are too many filters, or none";
  if (const char* problem = unaligned(call)) return problem;
  const Conv1x1Narrow f{a.pixels, static_cast<int32_t>(a.channels)};
  MBC_FOR_TYPE(a.type, T, { for_filters<MOST>(a.filters, [&](auto count) { run(T(), count, f); }); });
  return launched();
}

}  // namespace mbc
