// Stem convolutions on tensor cores: the first convolution of a network, with at most seven channels. Channels last;
// fp32 images may be channels first. This file has shapes, tiles, and the band of the image in shared memory, for the
// forward and the filter pass.
//
// Libraries pad three channels to eight, so that most of the numbers that they load and multiply are zeros. Here a row
// of a window, kernel_width * channels elements, is one run of memory: K is those runs one after another, each padded
// only to whole words. With channels first there is a run for each channel. A block works on a tile of the output and
// keeps the band of the image under it in shared memory. In volumes a tile is in one plane of the output, and a band has
// the rows of all planes under a window, one plane after another; images have one plane.
//
//   K of one output pixel, 7 x 7 x 3:   row 0: 21 elements, 1 of padding | row 1: 22 | ... | row 6: 22     = 154, to 160
#pragma once

#include "conv_operands.cuh"
#include "mma.cuh"
#include "stem_conv_arguments.h"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/stem_conv.py.
constexpr int STEM_COLUMNS = 64, STEM_STEPS = 24;
constexpr int STEM_VECTOR = 8;  // elements of 16 bits in a vector

// A part of the output: at most 64 columns of `rows` rows of plane `n`, counted over all images, from (y0, x0) on;
// `across` times 16 columns. The window begins at plane `z0` of the image, which may be outside.
struct StemTile {
  int64_t n;
  int32_t y0, x0, rows, columns, across, image, z0;
};

struct StemConv : ConvolutionShape {
  int32_t depth, out_depth, kernel_depth, stride_depth, pad_front;
  int32_t band;
  int32_t window_rows;      // rows of a window, of all its planes
  int32_t run, padded_run;  // elements of a row of a window; padded to whole words
  int32_t steps;            // steps of K = 16
  // The image in shared memory: its rows in a plane, elements of a row, elements before a row's first pixel (so that
  // rows start where vectors do in memory), elements of a plane and of all rows.
  int32_t band_rows, pitch, lead, plane, copy;
  bool straight, shifted;  // 16 bits: copies of the band as in memory, then shifted by one element
  bool wide, wide_image;   // the output is aligned for vectors; so is the image
  int32_t chunks, bands;         // parts of the output: STEM_COLUMNS columns, `band` rows
  int64_t tiles;

  StemConv(const StemConvArguments& a, bool forward, bool whole, bool whole_image = false)
      : ConvolutionShape(a), depth(narrow(a.depth)), out_depth(narrow(a.out_depth)), kernel_depth(narrow(a.kernel_depth)),
        stride_depth(narrow(a.stride_depth)), pad_front(narrow(a.pad_front)), band(narrow(a.band)) {
    const bool words = a.type == MBC_FP32;
    window_rows = kernel_depth * kernel_height;
    run = kernel_width * channels;
    padded_run = words ? run : (run + 1) / 2 * 2;
    steps = (window_rows * padded_run + 15) / 16;
    band_rows = (band - 1) * stride_height + kernel_height;
    lead = words ? 3 - (pad_left * channels + 3) % 4 : STEM_VECTOR - pad_left * channels % STEM_VECTOR;
    pitch = words ? (span(STEM_COLUMNS) + 6) / 4 * 4 : (span(STEM_COLUMNS) + 15) / STEM_VECTOR * STEM_VECTOR;
    plane = band_rows * pitch;
    copy = kernel_depth * plane;
    const bool both = stride_width * channels % 2 != 0;  // whether pixels start at even and at odd elements
    straight = !forward || both || lead % 2 == 0;
    shifted = forward && (both || lead % 2 != 0);
    chunks = static_cast<int32_t>(divide_up(out_width, STEM_COLUMNS));
    bands = static_cast<int32_t>(divide_up(out_height, band));
    tiles = a.rows * out_depth * bands * chunks;
    wide = whole;
    wide_image = whole_image && width * channels % (words ? 4 : STEM_VECTOR) == 0;
  }
  // In 32 bits: divisions of 64 bits take longer than an output row.
  __device__ StemTile tile(int64_t number) const {
    const auto index = static_cast<uint32_t>(number), across = static_cast<uint32_t>(chunks), down = static_cast<uint32_t>(bands);
    const uint32_t line = index / across, n = line / down, image = n / static_cast<uint32_t>(out_depth);
    const auto x0 = static_cast<int32_t>(index - line * across) * STEM_COLUMNS;
    const auto y0 = static_cast<int32_t>(line - n * down) * band;
    const int32_t columns = min(STEM_COLUMNS, out_width - x0);
    const int32_t z0 = static_cast<int32_t>(n - image * static_cast<uint32_t>(out_depth)) * stride_depth - pad_front;
    return {n, y0, x0, min(band, out_height - y0), columns, (columns + 15) / 16, static_cast<int32_t>(image), z0};
  }
  // The filter pass has groups of warps by elements of a window (M); the warps of a group divide the pixels (K).
  __host__ __device__ int32_t groups() const { return (steps + 1) / 2; }
  __host__ __device__ int32_t sharers() const { return groups() <= 2 ? 4 : groups() <= 4 ? 2 : 1; }
  // Offset in shared memory of a row of the window, from the pixel's first.
  __device__ int32_t row_offset(int32_t window_row) const {
    const int32_t z = window_row / kernel_height;
    return z * plane + (window_row - z * kernel_height) * pitch;
  }
  // Elements of a row under this number of columns of the output.
  __host__ __device__ int32_t span(int32_t columns) const {
    return ((columns - 1) * stride_width + kernel_width) * channels;
  }
};

// An element of a window, one K of the GEMM: its position.
struct KElement {
  int32_t row, at;  // of all rows of the window; `at`: element in the row
  bool there;       // false for padding

  __device__ KElement(const StemConv& f, int32_t number) {
    row = number / f.padded_run;
    at = number - row * f.padded_run;
    there = row < f.window_rows && at < f.run;
  }
  // The element's offset in the band from the pixel; 0 for padding.
  __device__ uint32_t in_band(const StemConv& f) const {
    return there ? static_cast<uint32_t>(f.row_offset(row) + f.lead + at) : 0;
  }
  // The element's index in a filter, channels last.
  __device__ int32_t in_filter(const StemConv& f) const { return row * f.run + at; }
};

// Filters that a thread stores as a vector: 16 bytes, or all of its filters of two tiles.
template <typename T, int TILES>
constexpr int FILTERS_OF_VECTOR = WIDTH<T> < 2 * TILES ? WIDTH<T> : 2 * TILES;

// The filter of a column of a tile of 8: permuted, so that the four threads of a pixel store adjacent vectors.
template <typename T, int TILES>
__device__ inline int32_t filter_of(int32_t tile, int32_t column) {
  constexpr int W = FILTERS_OF_VECTOR<T, TILES>, TILES_OF_VECTOR = W / 2;
  return (tile / TILES_OF_VECTOR * 4 + column / 2) * W + tile % TILES_OF_VECTOR * 2 + column % 2;
}

// Two elements as a word.
template <typename T>
__device__ inline uint32_t word_of(const T& low, const T& high) {
  const Vec<T, 2> pair{{low, high}};
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// A vector of the band of a tile: its offset in shared memory, and its position in a row of the image.
struct BandVector {
  int32_t to, image_z, image_y, from;
  bool inside;  // whether it is in the planes and rows of the image

  __device__ BandVector(const StemConv& f, const StemTile& tile, int32_t number) {
    const int32_t vectors = f.pitch / STEM_VECTOR, row = number / vectors, at = (number - row * vectors) * STEM_VECTOR;
    const int32_t z = row / f.band_rows;
    to = row * f.pitch + at;
    image_z = tile.z0 + z;
    image_y = tile.y0 * f.stride_height - f.pad_top + row - z * f.band_rows;
    from = (tile.x0 * f.stride_width - f.pad_left) * f.channels - f.lead + at;
    inside = z < f.kernel_depth && image_z >= 0 && image_z < f.depth && image_y >= 0 && image_y < f.height;
  }
  template <typename T>
  __device__ const T* line(const T* x, const StemConv& f, const StemTile& tile) const {
    return x + ((int64_t{tile.image} * f.depth + image_z) * f.height + image_y) * f.width * f.channels;
  }
  __device__ bool has(const StemConv& f, int32_t element) const {
    return inside && from + element >= 0 && from + element < f.width * f.channels;
  }
};

// The elements of a vector, zeros in the padding.
template <typename T>
__device__ inline Vec<T, STEM_VECTOR> read_vector(
    const T* x, const StemConv& f, const StemTile& tile, const BandVector& of) {
  const T* line = of.line(x, f, tile) + of.from;
  Vec<T, STEM_VECTOR> read;
  if (f.wide_image) {
    if (of.has(f, 0)) return *reinterpret_cast<const Vec<T, STEM_VECTOR>*>(line);
#pragma unroll
    for (int e = 0; e < STEM_VECTOR; ++e) read.v[e] = from_float<T>(0.0f);
  } else {
#pragma unroll
    for (int e = 0; e < STEM_VECTOR; ++e) read.v[e] = of.has(f, e) ? line[e] : from_float<T>(0.0f);
  }
  return read;
}

// Copies the image rows under the output rows of a tile, `straight`, `shifted` or both.
template <typename T>
__device__ inline void fetch_band(const T* x, T* image, const StemConv& f, const StemTile& tile) {
  constexpr int K = 4;  // vectors of a thread in flight
  const int32_t vectors = f.copy / STEM_VECTOR;
  T* earlier = image + (f.straight ? f.copy : 0);
  for (int32_t number = threadIdx.x; number < vectors; number += blockDim.x * K) {
    Vec<T, STEM_VECTOR> read[K];
    T next[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const BandVector of(f, tile, number + k * blockDim.x);
      read[k] = read_vector(x, f, tile, of);
      next[k] = f.shifted && of.has(f, STEM_VECTOR) ? of.line(x, f, tile)[of.from + STEM_VECTOR] : from_float<T>(0.0f);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int32_t to = (number + k * static_cast<int32_t>(blockDim.x)) * STEM_VECTOR;
      if (to >= f.copy) break;
      if (f.straight) store(image + to, read[k]);
      if (f.shifted) {
        Vec<T, STEM_VECTOR> moved;
#pragma unroll
        for (int e = 0; e < STEM_VECTOR; ++e) moved.v[e] = e + 1 < STEM_VECTOR ? read[k].v[e + 1] : next[k];
        store(earlier + to, moved);
      }
    }
  }
}

// Stores the accumulators of a warp: two output rows of 16 columns from (row, column) of the tile on; filters by
// `filter_of` from `first` on, a multiple of 4 vectors. `column`: the thread's column.
template <typename T, int TILES>
__device__ inline void write_pixels(
    const float (&sums)[2][TILES][4], T* y, const StemConv& f, const StemTile& tile, int32_t row, int32_t column,
    int32_t first) {
  constexpr int W = FILTERS_OF_VECTOR<T, TILES>;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t out_y = tile.y0 + row + m, out_x = tile.x0 + column + 8 * h;
      if (out_y >= f.out_height || out_x >= f.out_width) continue;
      T* to = y + ((tile.n * f.out_height + out_y) * f.out_width + out_x) * f.filters + first + threadIdx.x % 4 * W;
#pragma unroll
      for (int v = 0; v < 2 * TILES / W; ++v, to += 4 * W) {
        float result[W];
#pragma unroll
        for (int e = 0; e < W; ++e) result[e] = sums[m][(v * W + e) / 2][2 * h + e % 2];
        if (f.wide) {
          store_floats(to, result);
        } else {
#pragma unroll
          for (int e = 0; e < W; ++e) to[e] = from_float<T>(result[e]);
        }
      }
    }
}

}  // namespace mbc
