// Filter gradient of stem convolutions (a network's first, with at most seven channels) in bf16 and fp16, channels
// last. The first convolution of a network needs no data gradient.
//
// GEMM       M = elements of a window (stem_conv.cuh), N = filters, K = output pixels, split over `parts` blocks
//            (split-K) that `add_parts` adds in order.
// Tile       a warp computes 32 elements of the window x 64, 32 or 16 filters; if there are few elements, 2 or 4 warps
//            divide the pixels of a row. K = 16 pixels in each step.
// Warps      up to 12, all equal: cp.async ahead, then mma.sync m16n8k16; gradients through ldmatrix.trans.
// Shared     gradients of output rows in a pipeline of 3 stages of 64 pixels, two rows ahead, also across tiles; two
//            bands of the image, so that the next tile's band is in flight.
// Registers  at most 128, so that three blocks of five warps fit a multiprocessor.
// Limit      A fragments are read element by element: 369 us, bytes take 115 us (ResNet, batch 256, decision 011).
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for tile m = 0, 1 of the warp's two:
//
//   A (window)      k = 2t, 2t+1   2t+8, 2t+9          D            filters   8j + 2t     8j + 2t + 1
//     element g       a[m][0]        a[m][2]             element g          d[m][j][0]    d[m][j][1]
//     element g + 8   a[m][1]        a[m][3]             element g + 8      d[m][j][2]    d[m][j][3]
#include "stem_conv_filter.cuh"

namespace mbc {

// Copies the image rows under the output rows of tile `number` to `image`, asynchronously where they are aligned.
template <typename T>
__device__ inline void fetch_band_ahead(const T* x, T* image, const StemConv& f, int64_t number) {
  if (number >= f.tiles) return;
  const StemTile tile = f.tile(number);
  for (int32_t i = threadIdx.x; i < f.copy / STEM_VECTOR; i += blockDim.x) {
    const BandVector of(f, tile, i);
    if (f.wide_image) {
      const bool there = of.has(f, 0);
      cp_async_16(reinterpret_cast<uint4*>(image + of.to), there ? of.line(x, f, tile) + of.from : x, there);
    } else {
      store(image + of.to, read_vector(x, f, tile, of));
    }
  }
}

// Offset, in units of 16 bytes, of eight filters of a pixel's gradient in a stage; swizzled so that eight neighbouring
// pixels have no bank conflicts.
template <int TILES>
__device__ inline int32_t gradient_offset(int32_t pixel, int32_t eight) {
  return pixel * TILES + (eight ^ pixel / (8 / TILES) % TILES);
}

// A warp has two tiles of 16 elements of the window for all filters of the block; if there are few elements, several
// warps divide the pixels. Gradients are copied STEM_STAGES - 1 rows ahead, the image a tile ahead.
template <typename T, int TILES>
__global__ void __launch_bounds__(STEM_THREADS_OF_128_REGISTERS)
    stem_conv_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial, StemConv f) {
  constexpr int STAGE = STEM_COLUMNS * TILES;  // in units of 16 bytes
  MBC_DYNAMIC_SHARED(shared);
  T* const images = reinterpret_cast<T*>(shared + STEM_STAGES * STAGE);  // two bands
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t group = warp % f.groups(), sharer = warp / f.groups();
  const int32_t first = blockIdx.y * TILES * 8;

  RowsAhead ahead(f);
  const auto fetch_next = [&] {
    ahead.template fetch<TILES, STAGE>(dy, shared, f, first, [](int32_t pixel, int32_t eight) {
      return gradient_offset<TILES>(pixel, eight);
    });
  };

  uint32_t element_offsets[2][2];  // in a band, from its first pixel; [tile][row g or g + 8]
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) element_offsets[m][h] = KElement(f, (2 * group + m) * 16 + g + 8 * h).in_band(f);
  // The row of the 8 x 8 matrices whose address this thread passes to ldmatrix: matrices of 16 pixels x 16 filters, in
  // the order (pixels, filters) = low low, high low, low high, high high.
  const int32_t shown = lane / 8 % 2 * 8 + lane % 8, shown_eight = lane / 16;
  const int32_t pixel_stride = f.stride_width * f.channels;
  float sums[2][TILES][4] = {};

  fetch_band_ahead(x, images, f, blockIdx.x);
#pragma unroll
  for (int s = 0; s < STEM_STAGES - 1; ++s) fetch_next();
  int32_t stage = 0, rows_before = STEM_STAGES;
  const T* image = images;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const StemTile tile = f.tile(number);
    T* const other = images + (image == images ? f.copy : 0);
    for (int32_t row = 0; row < tile.rows; ++row) {
      // The copy of this tile's band started with the first row of the tile before.
      if (row == 0 && rows_before < STEM_STAGES - 1)
        cp_async_wait<0>();
      else
        cp_async_wait<STEM_STAGES - 2>();
      __syncthreads();  // all copies have arrived, and the row before this one has been read
      if (row == 0) fetch_band_ahead(x, other, f, number + gridDim.x);
      fetch_next();
      for (int32_t piece = sharer; piece < tile.across; piece += f.sharers()) {
        const int32_t at = row * f.stride_height * f.pitch + (piece * 16 + 2 * t) * pixel_stride;
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const T* from = image + element_offsets[m][h] + at;
            a[m][h] = word_of(from[0], from[pixel_stride]);
            a[m][2 + h] = word_of(from[8 * pixel_stride], from[9 * pixel_stride]);
          }
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, shared + stage * STAGE + gradient_offset<TILES>(piece * 16 + shown, 2 * i + shown_eight));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma_m16n8k16<T>(sums[m][2 * i], a[m], b[0], b[1]);
            mma_m16n8k16<T>(sums[m][2 * i + 1], a[m], b[2], b[3]);
          }
        }
      }
      stage = stage + 1 == STEM_STAGES ? 0 : stage + 1;
    }
    rows_before = tile.rows;
    image = other;
  }
  cp_async_wait<0>();

  write_part<TILES>(sums, reinterpret_cast<float*>(shared), partial, f, group, sharer, first);
}

template <typename T, int TILES>
void run_stem_conv_filter(const MbcCall& call, const StemConv& f, int64_t parts, bool accumulate) {
  float* partial = out<float>(call, 3);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(f.filters / TILES / 8));
  const unsigned threads = static_cast<unsigned>(32 * f.groups() * f.sharers());
  const int ring = STEM_STAGES * STEM_COLUMNS * TILES * 16 + f.copy * 4, exchange = f.groups() * 64 * TILES * 16;
  MBC_LAUNCH_SHARED((stem_conv_filter<T, TILES>), grid, threads, ring > exchange ? ring : exchange, call.stream,
                    in<T>(call, 0), in<T>(call, 1), partial, f);
  FilterParts(f).add(call, partial, parts, accumulate);
}

}  // namespace mbc

extern "C" const char* mbc_stem_conv_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StemConvArguments>(call);
  return with_working_type(a.type, [&](auto of) {
    using T = decltype(of);
    const StemConv f(a, false, aligned(in<T>(call, 1), 16), aligned(in<T>(call, 0), 16));
    if (f.filters % 64 == 0)
      run_stem_conv_filter<T, 8>(call, f, a.parts, a.accumulate != 0);
    else if (f.filters % 32 == 0)
      run_stem_conv_filter<T, 4>(call, f, a.parts, a.accumulate != 0);
    else
      run_stem_conv_filter<T, 2>(call, f, a.parts, a.accumulate != 0);
    return launched();
  });
}
