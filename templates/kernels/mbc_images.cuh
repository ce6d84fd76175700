// Kernels that compute every output element of an image from a window of another image.
//
// Channels first, one thread makes one element and neighbouring threads have neighbouring columns; channels last, one
// thread makes N channels of one pixel. Both walk over their outputs without dividing.
#pragma once

#include "mbc_device.cuh"

namespace mbc {

struct Image {
  int64_t channels, height, width;
};

// Where a thread stands: sample n, channel c (the first of N), row y and column x of its output.
struct Pixel {
  int64_t n, c;
  int32_t y, x;
};

// F: `make<N, LAST>(const Pixel&, int64_t at)` makes N elements from element `at` on; LAST: channels last.
template <typename F>
__global__ void each_channels_first(int64_t elements, Image image, Steps steps, F f) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < elements; i += stride, at.advance(steps)) {
    const int64_t n = at.outer / image.channels;
    const Pixel pixel{n, at.outer - n * image.channels, static_cast<int32_t>(at.middle),
                      static_cast<int32_t>(at.inner)};
    f.template make<1, false>(pixel, i);
  }
}

template <int N, typename F>
__global__ void each_channels_last(int64_t vectors, Image image, Steps steps, F f) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < vectors; i += stride, at.advance(steps)) {
    const uint32_t position = static_cast<uint32_t>(at.middle), width = static_cast<uint32_t>(image.width);
    const uint32_t y = position / width;
    const Pixel pixel{at.outer, at.inner * N, static_cast<int32_t>(y), static_cast<int32_t>(position - y * width)};
    f.template make<N, true>(pixel, i * N);
  }
}

// Runs f for every element of the output `image` of `rows` samples; `wide`: channels may go N at a time.
template <int N, typename F>
void for_each_pixel(cudaStream_t stream, int64_t layout, int64_t rows, Image image, bool wide, F f) {
  const int64_t elements = rows * image.channels * image.height * image.width;
  if (layout == MBC_CHANNELS_FIRST) {
    const unsigned blocks = blocks_for(elements);
    const Steps steps(image.width, image.height, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((each_channels_first<F>), blocks, THREADS, stream, elements, image, steps, f);
  } else if (wide && image.channels % N == 0) {
    const unsigned blocks = blocks_for(elements / N);
    const Steps steps(image.channels / N, image.height * image.width, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((each_channels_last<N, F>), blocks, THREADS, stream, elements / N, image, steps, f);
  } else {
    const unsigned blocks = blocks_for(elements);
    const Steps steps(image.channels, image.height * image.width, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((each_channels_last<1, F>), blocks, THREADS, stream, elements, image, steps, f);
  }
}

// Index of channel c of pixel (y, x) of sample n.
template <bool LAST>
__device__ inline int64_t element(const Image& image, int64_t n, int64_t c, int64_t y, int64_t x) {
  return LAST ? ((n * image.height + y) * image.width + x) * image.channels + c
              : ((n * image.channels + c) * image.height + y) * image.width + x;
}

}  // namespace mbc
