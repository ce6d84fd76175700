// Implicit GEMM with halo tiles: the tile of the image under a tile of the output, with its halo, in shared memory.
// Offsets of its pixels in the image.
#pragma once

#include "conv_operands.cuh"
#include "pipeline.cuh"
#include "halo_arguments.h"

// Pixels are numbered image after image, `lines` lines of `pitch` pixels each, so that neighbouring images and lines
// share their (zero) padding. A tile takes 32 groups of 8 pixels, `group` pixels from one to the next: consecutive
// pixels, or boxes 8 columns wide, `strips` of which cover a line. mbc/kernels/cuda/conv/halo.py computes these sizes.
//
//   group = 8: a tile is 256 consecutive pixels    group = pitch: a box of 8 columns x 32 lines, with its halo of
//   of one numbering                               kernel_width - 1 columns and kernel_height - 1 lines

namespace mbc {

constexpr int HALO_GROUPS = 16 * CONSUMERS, HALO_FILTERS = 64, HALO_CHANNELS = 64;
constexpr int MOST_HALO_PIXELS = 379;  // odd, so that chunks of channels have no bank conflicts
static_assert(MOST_HALO_PIXELS % 2 == 1);

struct HaloConv : ConvolutionShape, PixelGrid {
  int32_t taps, chunks, images, group, strips;  // chunks of 64 channels
  int32_t across, tiles;  // blocks of filters; tiles of filters and pixels
  int32_t chunk_pitch;          // bytes between chunks of 8 channels
  bool backward;

  explicit HaloConv(const HaloArguments& a)
      : ConvolutionShape(a), PixelGrid{static_cast<int32_t>(a.lines), static_cast<int32_t>(a.pitch)},
        taps(kernel_height * kernel_width), chunks(channels / HALO_CHANNELS), images(static_cast<int32_t>(a.rows)),
        group(static_cast<int32_t>(a.group)), strips(static_cast<int32_t>(a.strips)), across(filters / HALO_FILTERS),
        tiles(static_cast<int32_t>(divide_up(images * lines * pitch, group * HALO_GROUPS)) * strips * across),
        chunk_pitch((halo_pixels() | 1) * 16), backward(a.backward != 0) {}
  // The pixels of a tile with its halo.
  __host__ __device__ int32_t halo_pixels() const {
    return (HALO_GROUPS - 1) * group + 8 + (kernel_height - 1) * pitch + kernel_width - 1;
  }
  // The first pixel of a tile, and the column of the image at which its lines begin.
  __device__ int32_t first(int32_t tile) const { return tile / across / strips * group * HALO_GROUPS; }
  __device__ int32_t left(int32_t tile) const { return tile / across % strips * 8; }
  // The halo pixel `after` the first of a tile; images are counted from 1, so that no number is negative.
  __device__ GridPixel first_halo_pixel(int32_t tile, int32_t after) const {
    return locate(first(tile) + (lines - pad_top) * pitch + after);
  }
  // Offset of such a pixel in the image, in elements, or -1 for padding; `left` is that of the tile.
  __device__ int32_t input_offset(const GridPixel& at, int32_t left) const {
    const int32_t image = at.image - 1, column = left - pad_left + at.column;
    const bool there = at.line < height && image >= 0 && image < images && column >= 0 && column < width;
    return there ? ((image * height + at.line) * width + column) * channels : -1;
  }
  // Offset of the result of a pixel of the tile, in elements, or -1 outside the output.
  __device__ int32_t output_offset(const GridPixel& at, int32_t left) const {
    const int32_t column = left + at.column;
    const bool there = at.image < images && at.line < out_height && column < out_width;
    return there ? ((at.image * out_height + at.line) * out_width + column) * filters : -1;
  }
};

}  // namespace mbc
