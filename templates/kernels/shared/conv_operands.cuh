// Sizes of a convolution in the form that launchers read and in the form that kernels use, and walks over pixels.
#pragma once

#include "device.cuh"
#include "conv_operands_arguments.h"

namespace mbc {

// Sizes of one image in 32 bits, because indices within it are computed for every element.
struct ConvolutionShape {
  int32_t channels, height, width, filters, out_height, out_width, kernel_height, kernel_width, stride_height,
      stride_width, pad_top, pad_left;

  explicit ConvolutionShape(const ConvolutionSizes& a)
      : channels(narrow(a.channels)), height(narrow(a.height)), width(narrow(a.width)), filters(narrow(a.filters)),
        out_height(narrow(a.out_height)), out_width(narrow(a.out_width)), kernel_height(narrow(a.kernel_height)),
        kernel_width(narrow(a.kernel_width)), stride_height(narrow(a.stride_height)),
        stride_width(narrow(a.stride_width)), pad_top(narrow(a.pad_top)), pad_left(narrow(a.pad_left)) {}
};

struct GridPixel {
  int32_t image, line, column;
};

// Pixels of images numbered one image after another, `lines` lines of `pitch` pixels each.
struct PixelGrid {
  int32_t lines, pitch;

  __host__ __device__ GridPixel locate(int32_t index) const {
    const int32_t line = index / pitch, image = line / lines;
    return {image, line - image * lines, index - line * pitch};
  }
  // Moves by a distance, which `locate` returns for a number of pixels.
  __device__ void advance(GridPixel& at, const GridPixel& by) const {
    at.column += by.column;
    at.line += by.line;
    at.image += by.image;
    if (at.column >= pitch) {
      at.column -= pitch;
      ++at.line;
    }
    if (at.line >= lines) {
      at.line -= lines;
      ++at.image;
    }
  }
};

}  // namespace mbc
