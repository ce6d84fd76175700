// Common parts of depthwise convolutions and their filter pass: sizes, tiles and grids, and reading rows of a sample.
//
// A block owns some channels (channels last: neighbours, up to a warp of vectors; channels first: one) and a run of
// tiles of output pixels. A thread computes one tile after another, of N neighbouring channels, in registers: pixels
// that its windows share are read once, and pixels that neighbouring tiles share are still in the cache. These are
// kernels of 3 x 3 without dilation, at strides of 1 or 2; `depth_multiplier` is the number of filters of a channel.
// Larger filters have their own kernels (depthwise_rows.cuh); direct.cu takes everything else.
#pragma once

#include "images.cuh"
#include "depthwise_arguments.h"

#include <cstring>

namespace mbc {

// The image or the output. A sample has fewer than 2^31 elements, so that indices within it need 32 bits: this
// arithmetic is most of the instructions.
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
  int64_t rows, depth_multiplier;
  int32_t pad_top, pad_left;

  explicit Depthwise(const DepthwiseArguments& a)
      : image(Image(a.layout, a.channels, a.height, a.width)),
        output(Image(a.layout, a.channels * a.depth_multiplier, a.out_height, a.out_width)), rows(a.rows),
        depth_multiplier(a.depth_multiplier), pad_top(static_cast<int32_t>(a.pad_top)),
        pad_left(static_cast<int32_t>(a.pad_left)) {}
};

// Constants of an instantiation: channels of a thread, stride, kernel size, and the tile of a thread in output pixels.
template <int N_, int S_>
struct DepthwiseSize {
  static constexpr int N = N_, S = S_, K = 3;
  static constexpr int HEIGHT = (N == 1 ? 8 : 16 / N) / S, WIDTH = 2;
  static constexpr int BLOCKS = N == 1 ? 3 : 2;  // blocks for which a multiprocessor has registers
  static constexpr int WINDOW_HEIGHT = (HEIGHT - 1) * S + K, WINDOW_WIDTH = (WIDTH - 1) * S + K;
  // The data gradient is computed by tiles of image pixels: S x S of them for each of UP x ACROSS positions of the
  // stride. An output pixel reaches REACH of these positions.
  static constexpr int REACH = (K + S - 1) / S;
  static constexpr int UP = HEIGHT, ACROSS = S == 1 ? WIDTH : 1;
};

// The tiles of all samples, numbered along x first, in runs of equal length, one for each block.
struct TileRun {
  int64_t begin, end;
  __device__ TileRun(const Steps& steps, int64_t rows, int64_t part, int64_t parts) {
    const int64_t total = rows * steps.inner * steps.middle;
    begin = total / parts * part + min(part, total % parts);
    end = begin + total / parts + (part < total % parts ? 1 : 0);
  }
};

// Elements as they are stored, in whole words where possible: loading 16 bits at a time takes twice the instructions.
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

// The line of `COUNT` pixels of a sample from (y, x) on, 0 outside the sample. `plane`: the thread's channels of the
// sample.
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

// Threads of a block, and blocks over the channels.
struct DepthwiseGrid {
  dim3 block;
  unsigned columns;

  DepthwiseGrid(int64_t layout, int64_t channels, int vector) {
    const int64_t vectors = channels / vector;
    const bool last = layout == MBC_CHANNELS_LAST;
    // Blocks over the channels have equal widths: 36 vectors are twice 18, not 32 and 4.
    columns = static_cast<unsigned>(last ? divide_up(vectors, 32) : channels);
    block.x = last ? static_cast<unsigned>(divide_up(vectors, columns)) : 1;
    block.y = THREADS / block.x;
  }
  // Enough blocks to fill the GPU, but so few that the setup of a block serves at least two tiles for each thread.
  dim3 over(int64_t tiles) const {
    const int64_t wanted = divide_up(tiles, static_cast<int64_t>(block.y) * 2);
    const int64_t most = divide_up(multiprocessors() * 16, columns);
    return dim3(columns, static_cast<unsigned>(wanted < most ? wanted : most));
  }
};

// Runs `f` with the compiled sizes of a launch; returns false if there are none.
template <int N, typename F>
bool for_depthwise_size(const DepthwiseArguments& a, F f) {
  if (a.stride == 1) return f(DepthwiseSize<N, 1>{}), true;
  if (a.stride == 2) return f(DepthwiseSize<N, 2>{}), true;
  return false;
}

// N channels for each thread if they are adjacent. `first` and `second`: the images.
template <int N, typename T, typename F>
const char* run_depthwise(const DepthwiseArguments& a, const T* first, const T* second, F f) {
  const bool together = a.layout == MBC_CHANNELS_LAST && a.depth_multiplier == 1 && a.channels % N == 0;
  const bool wide = together && aligned(first, sizeof(T) * N) && aligned(second, sizeof(T) * N);
  const bool compiled = wide ? for_depthwise_size<N>(a, f) : for_depthwise_size<1>(a, f);
  return compiled ? launched() : "a depthwise convolution of this stride is not in this library";
}

}  // namespace mbc
