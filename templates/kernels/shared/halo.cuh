// Convolutions that keep a tile of the image with its halo in shared memory: where the halo's pixels lie in the image.
#pragma once

#include "conv_operands.cuh"
#include "pipeline.cuh"

// Images lie one below another, `lines` from one to the next, in lines of `pitch` pixels, so that an image's padding is
// its neighbour's, too, and zero. A tile takes 32 groups of 8 pixels, `group` apart: consecutive pixels, or boxes of 8
// columns, of which there are `strips` side by side. As in mbc/kernels/cuda/fp32_emulated/fp32_emulated_halo.py.
struct HaloArguments : ConvolutionSizes {
  int64_t backward;  // whether the weights are those of the pass whose output is the image here
  int64_t lines;
  int64_t pitch;
  int64_t group;
  int64_t strips;
};

namespace mbc {

constexpr int HALO_GROUPS = 16 * CONSUMERS, HALO_FILTERS = 64, HALO_CHANNELS = 64;
constexpr int MOST_HALO_PIXELS = 379;  // odd: chunks of neighbouring channels lie in different banks
static_assert(MOST_HALO_PIXELS % 2 == 1);

struct HaloConv : ConvolutionShape, PixelGrid {
  int32_t taps, chunks, images, group, strips;  // chunks: of channels, by the 64
  int32_t across, tiles;  // blocks of filters; tiles of them and of pixels
  int32_t chunk_pitch;          // bytes between chunks of 8 channels
  bool backward;

  explicit HaloConv(const HaloArguments& a)
      : ConvolutionShape(a), PixelGrid{static_cast<int32_t>(a.lines), static_cast<int32_t>(a.pitch)},
        taps(kernel_height * kernel_width), chunks(channels / HALO_CHANNELS), images(static_cast<int32_t>(a.rows)),
        group(static_cast<int32_t>(a.group)), strips(static_cast<int32_t>(a.strips)), across(filters / HALO_FILTERS),
        tiles(static_cast<int32_t>(divide_up(images * lines * pitch, group * HALO_GROUPS)) * strips * across),
        chunk_pitch((halo_pixels() | 1) * 16), backward(a.backward != 0) {}
  // Of a tile with its halo.
  __host__ __device__ int32_t halo_pixels() const {
    return (HALO_GROUPS - 1) * group + 8 + (kernel_height - 1) * pitch + kernel_width - 1;
  }
  // Of a tile, the first pixel, and the column of the image at which lines begin.
  __device__ int32_t first(int32_t tile) const { return tile / across / strips * group * HALO_GROUPS; }
  __device__ int32_t left(int32_t tile) const { return tile / across % strips * 8; }
  // Of its halo, the pixel so many after the first, counted an image further on.
  __device__ GridPixel first_halo_pixel(int32_t tile, int32_t after) const {
    return locate(first(tile) + (lines - pad_top) * pitch + after);
  }
  // Where such a pixel of a tile lies in the image, in elements, or -1 for padding; `left` is the tile's.
  __device__ int32_t input_offset(const GridPixel& at, int32_t left) const {
    const int32_t image = at.image - 1, column = left - pad_left + at.column;
    const bool there = at.line < height && image >= 0 && image < images && column >= 0 && column < width;
    return there ? ((image * height + at.line) * width + column) * channels : -1;
  }
  // Where the result of a pixel of the tile itself is written, likewise.
  __device__ int32_t output_offset(const GridPixel& at, int32_t left) const {
    const int32_t column = left + at.column;
    const bool there = at.image < images && at.line < out_height && column < out_width;
    return there ? ((at.image * out_height + at.line) * out_width + column) * filters : -1;
  }
};

}  // namespace mbc
