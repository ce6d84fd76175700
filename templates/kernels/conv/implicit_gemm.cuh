// Pixels under the windows of a convolution along one to three axes, for implicit_gemm.cu and implicit_gemm_filter.cu.
#pragma once

#include "implicit_gemm_arguments.h"
#include "mma_gemm.cuh"

namespace mbc {

// Division without a division, exact for dividends from 0 to 2^31 - 1: a multiple of the reciprocal, rounded up.
struct Divisor {
  uint32_t shift = 31, multiplier;

  explicit Divisor(int32_t number) {
    while (int64_t{1} << (shift - 31) < number) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << shift) / static_cast<uint32_t>(number) + 1);
  }
  __device__ int32_t operator()(int32_t dividend) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * multiplier >> shift);
  }
};

// One axis of the convolution that a launch computes.
struct WindowAxis {
  int32_t size, output, kernel, stride, pad;
  Divisor lines;  // divides by `output`

  WindowAxis(int64_t size_, int64_t output_, int64_t kernel_, int64_t stride_, int64_t pad_)
      : size(narrow(size_)), output(narrow(output_)), kernel(narrow(kernel_)), stride(narrow(stride_)), pad(narrow(pad_)),
        lines(output) {}
  // Position of the first tap of an output position; a bit for each tap that is inside.
  __device__ int32_t first(int32_t at) const { return at * stride - pad; }
  __device__ uint32_t inside(int32_t first) const {
    const int32_t from = max(-first, 0), to = min(size - first, kernel);
    return from < to ? (1u << to) - (1u << from) : 0;
  }
};

// Pixels of windows, for mma_gemm.cuh.
struct WindowPixels {
  static constexpr int BITS = 10;  // most taps along an axis, as in mbc/kernels/cuda/conv/implicit_gemm.py
  int32_t pixels, channels;
  WindowAxis z, y, x;

  explicit WindowPixels(const ImplicitGemmArguments& a)
      : pixels(narrow(a.rows * a.out_depth * a.out_height * a.out_width)), channels(narrow(a.channels)),
        z(a.depth, a.out_depth, a.kernel_depth, a.stride_depth, a.pad_front),
        y(a.height, a.out_height, a.kernel_height, a.stride_height, a.pad_top),
        x(a.width, a.out_width, a.kernel_width, a.stride_width, a.pad_left) {}
  __host__ __device__ int32_t taps() const { return z.kernel * y.kernel * x.kernel; }
  // Bits of a tap along the three axes.
  __device__ static uint32_t needs(int32_t z, int32_t y, int32_t x) { return 1u << x | 1u << (BITS + y) | 1u << (2 * BITS + z); }
  __device__ uint32_t needs(const KPosition& k) const { return needs(k.z, k.y, k.x); }
  __device__ MmaPixel locate(int32_t pixel) const {
    const int32_t line = x.lines(pixel), plane = y.lines(line), image = z.lines(plane);
    const int32_t column = pixel < pixels ? pixel - line * x.output : x.size + x.pad;  // right of all images
    const int32_t at_x = x.first(column), at_y = y.first(line - plane * y.output);
    const int32_t at_z = z.first(plane - image * z.output);
    return {(((image * z.size + at_z) * y.size + at_y) * x.size + at_x) * channels,
            x.inside(at_x) | y.inside(at_y) << BITS | z.inside(at_z) << 2 * BITS};
  }
  __device__ void advance(KPosition& k) const {
    k.channel += MMA_CHANNELS;
    k.offset += MMA_CHANNELS;
    if (k.channel < channels) return;
    k.offset += channels - k.channel;
    k.channel = 0;
    ++k.tap;
    if (++k.x < x.kernel) return;
    k.x = 0;
    k.offset += (x.size - x.kernel) * channels;
    if (++k.y < y.kernel) return;
    k.y = 0;
    k.offset += (y.size - y.kernel) * x.size * channels;
    ++k.z;
  }
};

}  // namespace mbc
