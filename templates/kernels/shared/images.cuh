// Maps that compute every element of an image from a window of another image.
//
// With channels first, a thread computes one element and neighbouring threads have neighbouring columns; with channels
// last, a thread computes N channels of one pixel.
#pragma once

#include "device.cuh"

namespace mbc {

// Sizes and strides of an image. The layout is a run-time value, because instantiating each kernel for each layout
// would double the time of a build.
struct Image {
  int64_t channels, height, width;
  int64_t n_stride, c_stride, y_stride, x_stride;

  Image(int64_t layout, int64_t channel_count, int64_t rows_of_pixels, int64_t columns)
      : channels(channel_count), height(rows_of_pixels), width(columns), n_stride(channels * height * width),
        c_stride(layout == MBC_CHANNELS_LAST ? 1 : height * width),
        y_stride(layout == MBC_CHANNELS_LAST ? channels * width : width),
        x_stride(layout == MBC_CHANNELS_LAST ? channels : 1) {}

  __device__ int64_t at(int64_t n, int64_t c, int64_t y, int64_t x) const {
    return n * n_stride + c * c_stride + y * y_stride + x * x_stride;
  }
};

// The output position of a thread: sample n, channel c (the first of N), row y and column x.
struct Pixel {
  int64_t n, c;
  int32_t y, x;
};

// F: `make<N>(const Pixel&, int64_t at)` computes N elements from element `at` on. `last`: channels last.
template <int N, typename F>
__global__ void each_pixel(int64_t vectors, Image image, Steps steps, bool last, F f) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < vectors; i += stride, at.advance(steps)) {
    Pixel pixel;
    if (last) {
      const int64_t y = quotient(at.middle, image.width);
      pixel = {at.outer, at.inner * N, static_cast<int32_t>(y), static_cast<int32_t>(at.middle - y * image.width)};
    } else {
      const int64_t n = quotient(at.outer, image.channels);
      pixel = {n, at.outer - n * image.channels, static_cast<int32_t>(at.middle), static_cast<int32_t>(at.inner)};
    }
    f.template make<N>(pixel, i * N);
  }
}

template <int N, typename F>
void run_each_pixel(cudaStream_t stream, bool last, int64_t rows, const Image& image, F f) {
  const int64_t vectors = rows * image.channels * image.height * image.width / N;
  const unsigned blocks = blocks_for(vectors);
  const int64_t threads = static_cast<int64_t>(blocks) * THREADS;
  const Steps steps = last ? Steps(image.channels / N, image.height * image.width, threads)
                           : Steps(image.width, image.height, threads);
  MBC_LAUNCH((each_pixel<N, F>), blocks, THREADS, stream, vectors, image, steps, last, f);
}

// Runs f for every element of the output `image` of `rows` samples. `wide`: everything is aligned for N channels
// together.
template <int N, typename F>
void for_each_pixel(cudaStream_t stream, int64_t layout, int64_t rows, const Image& image, bool wide, F f) {
  const bool last = layout == MBC_CHANNELS_LAST;
  if constexpr (N > 1) {
    if (last && wide && image.channels % N == 0) return run_each_pixel<N>(stream, last, rows, image, f);
  }
  run_each_pixel<1>(stream, last, rows, image, f);
}

}  // namespace mbc
