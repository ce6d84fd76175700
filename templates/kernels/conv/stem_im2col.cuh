// Stem convolutions (a network's first, with at most seven channels) in bf16 and fp16, channels last, on Hopper's
// tensor cores: the windows of a tile are copied to shared memory (im2col), for the forward and the filter pass.
//
// A row of a window, kernel_width * channels elements, is one run of memory, which is padded to whole vectors of 8
// here. Windows overlap, so that a row of the image is copied once for all windows that contain it, as core matrices
// for wgmma:
//
//   vector 0 of image row 0: 64 pixels x 16 bytes | vector 1: 64 pixels x 16 bytes | ... | vector 0 of image row 1 | ...
//
// The windows of an output row are those of the image rows from row * stride_height on, one after another.
#pragma once

#include "stem_conv.cuh"
#include "pipeline.cuh"
#include "tensor_map.cuh"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/stem_im2col.py.
constexpr int IM2COL_FILTERS = 64;                     // filters of a block
constexpr int IM2COL_VECTOR_BYTES = STEM_COLUMNS * 16;  // bytes of a vector of a row, for the windows of 64 pixels
constexpr int IM2COL_PADDING_BYTES = 2 * IM2COL_VECTOR_BYTES;  // zeros for K = 16
constexpr int IM2COL_IMAGES = 2;                       // bands of the image in shared memory
constexpr int IM2COL_BLOCKS = 3;                       // blocks of a multiprocessor in the forward pass
constexpr int IM2COL_ALIGNED_BYTES = 1008;             // padding with which shared memory begins at a multiple of 1,024

constexpr int IM2COL_THREADS = WARPGROUP + 32;  // a warpgroup, and a warp that copies

struct Im2col : StemConv {
  static constexpr int PADDED_STEPS = 4;  // steps of K = 16: the forward pass is compiled for multiples of this number

  int32_t vectors;  // vectors of a row of a window
  int32_t image_lead;  // elements in shared memory before a tile's first pixel: copies begin at multiples of 16 bytes
  int32_t image_pitch, image_bytes;  // elements of a row of a band in shared memory; bytes of a band
  uint32_t inverse;                  // 65,536 divided by `vectors`, rounded up

  explicit Im2col(const StemConvArguments& a)
      : StemConv(a, false, true),
        vectors(static_cast<int32_t>(divide_up(run, 8))),
        image_lead((8 - pad_left * channels % 8) % 8),
        image_pitch(static_cast<int32_t>(divide_up(image_lead + span(STEM_COLUMNS) + 8 * vectors - run + 2, 8)) * 8),
        image_bytes(static_cast<int32_t>(divide_up(band_rows * image_pitch * 2, 128)) * 128),
        inverse(static_cast<uint32_t>(divide_up(65536, vectors))) {}
  __host__ __device__ int32_t window_vectors() const { return kernel_height * vectors; }
  // Tensor map of the image rows under a tile.
  __host__ __device__ int32_t windows_bytes() const { return band_rows * vectors * IM2COL_VECTOR_BYTES; }
  __device__ int32_t row_begin(int32_t row) const { return row * stride_height * vectors * IM2COL_VECTOR_BYTES; }

  // Tensor map of bands of the image, as words: rows of a box are longer than 256 elements.
  const char* set_image(TensorMap& map, const void* x, int64_t images) const {
    return make_tensor_map(map, x, 4, {int64_t{width} * channels / 2, height, images}, {image_pitch / 2, band_rows, 1}, false);
  }
  // Tensor map of rows of the output and of its gradient.
  const char* set_features(TensorMap& map, const void* y, int64_t images) const {
    return make_tensor_map(map, y, 2, {filters, out_width, images * out_height}, {IM2COL_FILTERS, STEM_COLUMNS, 1}, true);
  }
  __device__ void copy_band(char* to, const TensorMap& image, const StemTile& tile, Barrier& full) const {
    const int32_t first = tile.x0 * stride_width * channels - pad_left * channels - image_lead;
    full.arrive_expect_tx(band_rows * image_pitch * 2);
    tma_load(to, image, {first / 2, tile.y0 * stride_height - pad_top, static_cast<int32_t>(tile.n)}, full);
  }
  __device__ int32_t features_row(const StemTile& tile, int32_t row) const {
    return static_cast<int32_t>(tile.n) * out_height + tile.y0 + row;
  }
};

// A barrier of the warpgroup, which its threads pass together.
struct WarpgroupSync {
  Barrier& barrier;  // with 4 arrivals
  uint32_t parity = 0;

  __device__ void operator()() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
    barrier.wait(parity);
    parity ^= 1;
  }
};

// 32 of the 64 bits of two words.
__device__ inline uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift);
}

// Copies the windows of a tile, by a warpgroup. Pixels may begin at odd elements: five words contain the four that are
// stored. MASKED: zeros in the padding of rows of windows, otherwise the elements that follow in the image.
template <bool MASKED>
__device__ inline void lay_out_windows(const char* image, char* windows, const Im2col& f) {
  const int32_t column = threadIdx.x % STEM_COLUMNS, mine = threadIdx.x / STEM_COLUMNS;
  const int32_t pixel = f.image_lead + column * f.stride_width * f.channels;
  const uint32_t shift = static_cast<uint32_t>(pixel) % 2 * 16;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(image) + pixel / 2;
  const int32_t left = f.run - (f.vectors - 1) * 8;  // elements of the last vector of a row
#pragma unroll 4
  for (int32_t i = mine; i < f.band_rows * f.vectors; i += WARPGROUP / STEM_COLUMNS) {
    const auto row = static_cast<int32_t>(static_cast<uint32_t>(i) * f.inverse >> 16), number = i - row * f.vectors;
    const uint32_t* from = words + row * (f.image_pitch / 2) + number * 4;
    uint32_t read[5], vector[4];
#pragma unroll
    for (int w = 0; w < 5; ++w) read[w] = from[w];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      vector[w] = funnel_shift(read[w], read[w + 1], shift);
      if (MASKED && number == f.vectors - 1) vector[w] &= 2 * w + 1 < left ? 0xffffffffu : 2 * w < left ? 0xffffu : 0u;
    }
    *reinterpret_cast<uint4*>(windows + i * IM2COL_VECTOR_BYTES + column * 16) = {vector[0], vector[1], vector[2], vector[3]};
  }
}

}  // namespace mbc
