// Convolutions of images with few channels (the first layer of a network) on tensor cores, channels last; images
// of fp32 may have them first.
//
// Libraries pad three channels to eight, so that most of what they load and multiply is zeros. Here a row of a window,
// kernel_width * channels elements, is one run of memory: the terms of a sum are those runs one after another, each
// padded to whole words only. Where channels come first it is as many runs, each of one channel. A block works on a tile
// of the output and keeps the band of the image under it in shared memory.
#pragma once

#include "mbc_convolution.cuh"
#include "mbc_mma.cuh"

struct FewChannelsArguments : ConvolutionSizes {
  int64_t type;
  int64_t band;  // output rows of a block, even
  int64_t parts;  // of the filter pass: blocks that share out the image
  int64_t accumulate;
  int64_t image_layout;  // of fp32 images: others are channels last
  int64_t products;      // of fp32: in tf32 that make one, 1 or 3
};

namespace mbc {

// As in mbc/kernels/own/few_channels.py.
constexpr int FEW_COLUMNS = 64, FEW_STEPS = 24;

// Of the output: 64 columns at most of `rows` rows of one image, from (y0, x0) on; `across` pieces of 16 columns.
struct FewTile {
  int64_t n;
  int32_t y0, x0, rows, columns, across;
};

struct FewChannels : ConvolutionShape {
  int32_t band;
  int32_t planes;           // of an image in memory: its channels where they come first
  int32_t together;         // elements of a pixel in a plane
  int32_t run, padded_run;  // elements of a row of a window; to whole words
  int32_t steps;            // of 16 terms
  // Of the image in shared memory, plane by plane: rows of a plane, elements of a row, those before its first pixel,
  // elements of all rows.
  int32_t band_rows, pitch, lead, copy;
  bool twice, wide, wide_image;  // two copies of the band; the output takes vectors, so does the image in fp32
  int32_t chunks, bands;         // of the output: of FEW_COLUMNS columns and of `band` rows
  int64_t tiles;

  FewChannels(const FewChannelsArguments& a, bool forward, bool whole, bool whole_image = false)
      : ConvolutionShape(a), band(static_cast<int32_t>(a.band)) {
    const bool words = a.type == MBC_FP32;
    planes = words && a.image_layout == MBC_CHANNELS_FIRST ? channels : 1;
    together = channels / planes;
    run = kernel_width * together;
    padded_run = words ? run : (run + 1) / 2 * 2;
    steps = (planes * kernel_height * padded_run + 15) / 16;
    band_rows = (band - 1) * stride_height + kernel_height;
    lead = words ? 3 - (pad_left * together + 3) % 4 : 0;  // so that rows of shared memory start where vectors do
    pitch = words ? (span(FEW_COLUMNS) + 6) / 4 * 4 : (span(FEW_COLUMNS) + 3) / 2 * 2;
    copy = planes * band_rows * pitch;
    twice = forward && !words && stride_width * channels % 2 != 0;
    chunks = static_cast<int32_t>(divide_up(out_width, FEW_COLUMNS));
    bands = static_cast<int32_t>(divide_up(out_height, band));
    tiles = a.rows * bands * chunks;
    wide = whole;
    wide_image = whole_image && width * together % 4 == 0;
  }
  __device__ FewTile tile(int64_t number) const {
    const int32_t x0 = static_cast<int32_t>(number % chunks) * FEW_COLUMNS;
    const int32_t y0 = static_cast<int32_t>(number / chunks % bands) * band, columns = min(FEW_COLUMNS, out_width - x0);
    return {number / chunks / bands, y0, x0, min(band, out_height - y0), columns, (columns + 15) / 16};
  }
  // Of the filter pass: warps that make different terms, and that make the same of different pixels.
  __host__ __device__ int32_t groups() const { return (steps + 1) / 2; }
  __host__ __device__ int32_t sharers() const { return groups() <= 2 ? 4 : groups() <= 4 ? 2 : 1; }
  // Elements of a row of a plane under so many columns of the output.
  __host__ __device__ int32_t span(int32_t columns) const {
    return ((columns - 1) * stride_width + kernel_width) * together;
  }
};

// One of the products that make an element of the output: where it is in a window.
struct Term {
  int32_t plane, row, at;  // `at`: element of the row
  bool there;              // others are there for their sum's length only

  __device__ Term(const FewChannels& f, int32_t number) {
    const int32_t line = number / f.padded_run;
    plane = line / f.kernel_height;
    row = line - plane * f.kernel_height;
    at = number - line * f.padded_run;
    there = plane < f.planes && at < f.run;
  }
  // The element of the band, from where the pixel is; any where there is no such term.
  __device__ uint32_t in_band(const FewChannels& f) const {
    return there ? static_cast<uint32_t>((plane * f.band_rows + row) * f.pitch + f.lead + at) : 0;
  }
  // The element of a filter, channels last.
  __device__ int32_t in_filter(const FewChannels& f) const { return (row * f.run + at) * f.planes + plane; }
};

// Tiles of 8 filters are permuted so that what the four threads of a pixel store at once lies side by side: the filter
// of a column of a tile.
template <typename T>
__device__ inline int32_t filter_of(int32_t tile, int32_t column) {
  constexpr int W = WIDTH<T>, TILES_OF_VECTOR = W / 2;
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

// The image rows under the output rows of a tile, as far as its pieces reach; zeros in the padding.
template <typename T>
__device__ inline void fetch_band(const T* x, T* image, const FewChannels& f, const FewTile& tile) {
  constexpr int K = 8;  // in registers first, so that many reads are on their way at once
  const int32_t from = (tile.x0 * f.stride_width - f.pad_left) * f.channels, span = f.span(tile.across * 16);
  for (int32_t row = threadIdx.x / 32; row < f.band_rows; row += blockDim.x / 32) {
    const int32_t image_y = tile.y0 * f.stride_height - f.pad_top + row;
    const bool inside = image_y >= 0 && image_y < f.height;
    const T* line = x + (tile.n * f.height + image_y) * f.width * f.channels + from;
    for (int32_t e = threadIdx.x % 32; e < f.pitch; e += 32 * K) {
      T read[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int32_t at = e + 32 * k;
        const bool there = inside && at < span && from + at >= 0 && from + at < f.width * f.channels;
        read[k] = there ? line[at] : from_float<T>(0.0f);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int32_t at = e + 32 * k;
        if (at < f.pitch) image[row * f.pitch + at] = read[k];
        if (f.twice && at + 1 < f.pitch) image[f.copy + row * f.pitch + at + 1] = read[k];
      }
    }
  }
}

// What a warp made, two output rows of 16 columns from (row, column) of the tile on; filters by `filter_of` from `first`
// on, a multiple of 4 vectors. `column`: that of the thread.
template <typename T, int TILES>
__device__ inline void write_pixels(
    const float (&sums)[2][TILES][4], T* y, const FewChannels& f, const FewTile& tile, int32_t row, int32_t column,
    int32_t first) {
  constexpr int W = WIDTH<T>;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t out_y = tile.y0 + row + m, out_x = tile.x0 + column + 8 * h;
      if (out_y >= f.out_height || out_x >= f.out_width) continue;
      T* to = y + ((tile.n * f.out_height + out_y) * f.out_width + out_x) * f.filters + first + threadIdx.x % 4 * W;
#pragma unroll
      for (int v = 0; v < 2 * TILES / W; ++v, to += 4 * W) {
        float made[W];
#pragma unroll
        for (int e = 0; e < W; ++e) made[e] = sums[m][(v * W + e) / 2][2 * h + e % 2];
        if (f.wide) {
          store_floats(to, made);
        } else {
#pragma unroll
          for (int e = 0; e < W; ++e) to[e] = from_float<T>(made[e]);
        }
      }
    }
}

}  // namespace mbc
