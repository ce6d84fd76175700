// Maximum pooling channels last, by square windows whose side is known when compiling: everything that a thread reads is
// on its way at once, it keeps its channels, and pairs of 16-bit elements are compared at once.
#pragma once

#include "mbc_batch_norm.cuh"
#include "mbc_windows.cuh"

namespace mbc {

// What the maximum is of. `slope` tells whether it rises or falls with x, so that the largest or the smallest x is sought
// and made into what is wanted once; `CLAMPS`: what would be below zero is zero.
struct AsItIs {
  static constexpr bool CLAMPS = false;
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float slope(const Channel&) const { return 1.0f; }
  __device__ float operator()(const Channel&, float x, float) const { return x; }
};

struct NormalizedAndRectified : NormalizeRelu {
  static constexpr bool CLAMPS = true;
  __device__ float slope(const Channel& channel) const { return channel.scale; }
};

constexpr int POOL_WAVES = 1;  // of blocks, at most

template <typename T>
constexpr int IN_WORD = 4 / static_cast<int>(sizeof(T));

// Every element of a word the same.
template <typename T>
__device__ inline uint32_t all_of(T value) {
  Bits<sizeof(T)> bits;
  memcpy(&bits, &value, sizeof(T));
  return sizeof(T) == 2 ? bits * 0x10001u : bits;
}

// Element by element: ones where a is above b.
template <typename T>
__device__ inline uint32_t above(uint32_t a, uint32_t b) {
#ifndef MBC_EMULATED
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __hgt2_mask(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  if constexpr (std::is_same_v<T, __half>)
    return __hgt2_mask(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
#endif
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < IN_WORD<T>; ++i)
    if (to_float(element_of<T>(a, i)) > to_float(element_of<T>(b, i))) mask |= uint32_t{Bits<sizeof(T)>(~0u)} << i * 16;
  return mask;
}

// Element by element: ones where a is no number.
template <typename T>
__device__ inline uint32_t unknown(uint32_t a) {
#ifndef MBC_EMULATED
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __hneu2_mask(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(a));
  if constexpr (std::is_same_v<T, __half>)
    return __hneu2_mask(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(a));
#endif
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < IN_WORD<T>; ++i)
    if (isnan(to_float(element_of<T>(a, i)))) mask |= uint32_t{Bits<sizeof(T)>(~0u)} << i * 16;
  return mask;
}

__device__ inline uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

template <typename T, int N, int SIDE, typename F>
__global__ void __launch_bounds__(THREADS, 3)
    max_pool_last(const T* x, T* y, uint8_t* index, Window window, int64_t pixels, F f) {
  using Channel = typename F::Channel;
  constexpr int WORDS = Held<T, N>::WORDS, IN = IN_WORD<T>, PLACES = SIDE * SIDE;
  const int64_t channels = window.output.channels;
  const auto height = static_cast<uint32_t>(window.input.height), width = static_cast<uint32_t>(window.input.width);
  __shared__ Shelf<Channel, N> shelf;
  shelf.fill(channels, f);
  __syncthreads();
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (c >= channels) return;
  uint32_t flip[WORDS] = {};  // signs, where f falls
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (f.slope(shelf.take(j)) < 0.0f) flip[j / IN] |= 1u << ((j % IN + 1) * 8 * sizeof(T) - 1);
  const uint32_t lowest = all_of(from_float<T>(-INFINITY));

  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; p < pixels; p += step) {
    const int64_t line = quotient(p, window.output.width), n = quotient(line, window.output.height);
    const int32_t top = static_cast<int32_t>(line - n * window.output.height) * window.stride_height - window.pad_top;
    const int32_t left = static_cast<int32_t>(p - line * window.output.width) * window.stride_width - window.pad_left;
    const T* from = x + window.input.at(n, c, top, left);
    Held<T, N> v[PLACES];
#pragma unroll
    for (int k = 0; k < PLACES; ++k) {
      const int r = k / SIDE, s = k % SIDE;
      if (static_cast<uint32_t>(top + r) < height && static_cast<uint32_t>(left + s) < width) {
        v[k] = hold<N>(from + r * window.input.y_stride + s * window.input.x_stride);
      } else {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) v[k].words[w] = lowest ^ flip[w];
      }
    }
    const auto first = static_cast<uint32_t>(max(0, -top) * SIDE + max(0, -left));  // that is not padding
    uint32_t where[WORDS], best[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      where[w] = first * (IN == 2 ? 0x10001u : 1u);
      best[w] = lowest;
    }
    // The first of equals wins; a NaN wins over everything before it.
#pragma unroll
    for (int k = 0; k < PLACES; ++k)
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const uint32_t value = v[k].words[w] ^ flip[w], mask = above<T>(value, best[w]) | unknown<T>(value);
        best[w] = choose(mask, value, best[w]);
        where[w] = choose(mask, k * (IN == 2 ? 0x10001u : 1u), where[w]);
      }
    Vec<T, N> made;
    Vec<uint8_t, N> places;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Channel channel = shelf.take(j);
      const float value = f(channel, to_float(element_of<T>(best[j / IN] ^ flip[j / IN], j % IN)), 0.0f);
      made.v[j] = from_float<T>(value);
      const bool level = f.slope(channel) == 0.0f || (F::CLAMPS && value <= 0.0f);  // all of the window are the same
      places.v[j] = static_cast<uint8_t>(level ? first : where[j / IN] >> j % IN * 16);
    }
    store(y + p * channels + c, made);
    if (index != nullptr) store(index + p * channels + c, places);
  }
}

// Every thread makes the gradient of STRIDE x STRIDE pixels, those that the same windows hold, and reads each of the
// windows once. Rows and columns of `cells` begin with the padding.
template <typename T, int N, int SIDE, int STRIDE>
__global__ void __launch_bounds__(THREADS, 3)
    max_pool_backward_last(const uint8_t* index, const T* dy, T* dx, Window window, int32_t down, int32_t across,
                           int64_t cells) {
  constexpr int REACH = (SIDE + STRIDE - 1) / STRIDE;  // windows over a cell, along a side
  const int64_t channels = window.output.channels;
  const auto height = static_cast<uint32_t>(window.output.height), width = static_cast<uint32_t>(window.output.width);
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (c >= channels) return;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; p < cells; p += step) {
    const int64_t line = quotient(p, across), n = quotient(line, down);
    const auto y = static_cast<int32_t>(line - n * down), x = static_cast<int32_t>(p - line * across);
    const int64_t from = window.output.at(n, c, y, x);  // the last of the windows
    Held<T, N> v[REACH][REACH];
    Held<uint8_t, N> where[REACH][REACH];
#pragma unroll
    for (int r = 0; r < REACH; ++r)
#pragma unroll
      for (int s = 0; s < REACH; ++s) {
        if (static_cast<uint32_t>(y - r) < height && static_cast<uint32_t>(x - s) < width) {
          const int64_t at = from - r * window.output.y_stride - s * window.output.x_stride;
          v[r][s] = hold<N>(dy + at);
          where[r][s] = hold<N>(index + at);
        } else {
          v[r][s] = {};
          where[r][s] = {};
        }
      }
    const int32_t top = y * STRIDE - window.pad_top, left = x * STRIDE - window.pad_left;
    T* to = dx + window.input.at(n, c, top, left);
#pragma unroll
    for (int i = 0; i < STRIDE * STRIDE; ++i) {
      const int row = i / STRIDE, column = i % STRIDE;
      float sum[N] = {};
#pragma unroll
      for (int k = REACH * REACH - 1; k >= 0; --k) {
        const int r = k / REACH, s = k % REACH, down_in = r * STRIDE + row, right_in = s * STRIDE + column;
        if (down_in >= SIDE || right_in >= SIDE) continue;
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (where[r][s][j] == down_in * SIDE + right_in) sum[j] += to_float(v[r][s][j]);
      }
      if (top + row < 0 || top + row >= window.input.height || left + column < 0 ||
          left + column >= window.input.width)
        continue;
      Vec<T, N> made;
#pragma unroll
      for (int j = 0; j < N; ++j) made.v[j] = from_float<T>(sum[j]);
      store(to + row * window.input.y_stride + column * window.input.x_stride, made);
    }
  }
}

// Of blocks that walk over `items` pixels of a tile of channels: as many as there is room for.
inline dim3 pixel_grid(const Tiling& tiling, int64_t items) {
  const int64_t most = multiprocessors() * 3 * POOL_WAVES / tiling.columns, wanted = divide_up(items, tiling.down());
  return dim3(tiling.columns, static_cast<unsigned>(wanted < most ? wanted : most < 1 ? 1 : most));
}

// Whether there was such a kernel for the window, which everything is aligned for.
template <typename T, typename F>
bool ran_max_pool(cudaStream_t stream, const Window& window, int64_t rows, const T* x, T* y, uint8_t* index, F f) {
  constexpr int N = WIDTH<T>;
  const Tiling tiling(window.output.channels / N);
  const int64_t pixels = rows * window.output.height * window.output.width;
  const dim3 grid = pixel_grid(tiling, pixels), block(tiling.along, tiling.down());
  switch (window.side()) {
    case 2: MBC_LAUNCH((max_pool_last<T, N, 2, F>), grid, block, stream, x, y, index, window, pixels, f); return true;
    case 3: MBC_LAUNCH((max_pool_last<T, N, 3, F>), grid, block, stream, x, y, index, window, pixels, f); return true;
    default: return false;
  }
}

template <int SIDE, int STRIDE, typename T>
void run_max_pool_backward(cudaStream_t stream, const Window& window, int64_t rows, const uint8_t* index, const T* dy,
                           T* dx) {
  constexpr int N = WIDTH<T>;
  const Tiling tiling(window.output.channels / N);
  const auto down = static_cast<int32_t>(divide_up(window.input.height + window.pad_top, STRIDE));
  const auto across = static_cast<int32_t>(divide_up(window.input.width + window.pad_left, STRIDE));
  const int64_t cells = rows * down * across;
  MBC_LAUNCH((max_pool_backward_last<T, N, SIDE, STRIDE>), pixel_grid(tiling, cells),
             dim3(tiling.along, tiling.down()), stream, index, dy, dx, window, down, across, cells);
}

template <typename T>
bool ran_max_pool_backward(cudaStream_t stream, const Window& window, int64_t rows, const uint8_t* index, const T* dy,
                           T* dx) {
  if (window.stride_height != window.stride_width) return false;
  switch (window.side() * 10 + window.stride_height) {
    case 22: run_max_pool_backward<2, 2>(stream, window, rows, index, dy, dx); return true;
    case 31: run_max_pool_backward<3, 1>(stream, window, rows, index, dy, dx); return true;
    case 32: run_max_pool_backward<3, 2>(stream, window, rows, index, dy, dx); return true;
    default: return false;
  }
}

}  // namespace mbc
