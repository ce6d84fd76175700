// Filter gradient of stem convolutions (a network's first, with at most seven channels) in fp32 (3xTF32) and tf32. The
// image and gradients are channels last.
//
// GEMM       M = elements of a window (stem_conv.cuh), N = filters, K = output pixels, split over `parts` blocks
//            (split-K) that `add_parts` adds in order.
// Tile       a warp computes 32 elements of the window x 32 filters (tf32: also 64); if there are few elements, 2 or
//            4 warps divide the pixels of a row. K = 8 pixels in each step.
// Warps      up to 12, all equal: gradients ahead with cp.async, then mma.sync m16n8k8 of tf32, three for one in fp32
//            (SPLIT); accumulators of a row are added outside tensor cores.
// Shared     gradients of output rows in a pipeline of 3 stages of 64 pixels; the band of the image under a tile.
// Registers  at most 168 a thread (launch bounds: 384 threads).
// Limit      as in stem_conv_fp32.cu.
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for tile m = 0, 1 of the warp's two:
//
//   A (window)      k = t      t + 4          D            filters   8j + 2t     8j + 2t + 1
//     element g      a[m][0]   a[m][2]          element g          d[m][j][0]    d[m][j][1]
//     element g + 8  a[m][1]   a[m][3]          element g + 8      d[m][j][2]    d[m][j][3]
#include "stem_conv_filter.cuh"
#include "stem_conv_fp32.cuh"

namespace mbc {

// The pipeline is that of stem_conv_filter.cu. A pixel's gradient has a padding of 8 words, so that a warp's reads, 8
// words of each of 4 pixels, have no bank conflicts.
template <bool SPLIT, int TILES>
__global__ void __launch_bounds__(STEM_MOST_THREADS) stem_conv_filter_fp32(
    const float* __restrict__ x, const float* __restrict__ dy, float* __restrict__ partial, StemConv f) {
  constexpr int PITCH = TILES * 8 + 8, STAGE = STEM_COLUMNS * PITCH, V = TILES * 2;
  MBC_DYNAMIC_SHARED(shared);
  float* gradients = reinterpret_cast<float*>(shared);
  float* image = gradients + STEM_STAGES * STAGE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t group = warp % f.groups(), sharer = warp / f.groups();
  const int32_t first = blockIdx.y * TILES * 8;

  RowsAhead ahead(f);
  const auto gradient_offset = [](int32_t pixel, int32_t four) { return pixel * (PITCH / 4) + four; };
  const auto fetch_next = [&] { ahead.fetch<V, STAGE / 4>(dy, shared, f, first, gradient_offset); };

  uint32_t element_offsets[2][2];  // in the band, from its first pixel; [tile][row g or g + 8]
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) element_offsets[m][h] = KElement(f, (2 * group + m) * 16 + g + 8 * h).in_band(f);
  const int32_t pixel_stride = f.stride_width * f.channels;
  float sums[2][TILES][4] = {}, part[2][SPLIT ? TILES : 1][4] = {};

#pragma unroll
  for (int s = 0; s < STEM_STAGES - 1; ++s) fetch_next();
  int32_t stage = 0;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const StemTile tile = f.tile(number);
    __syncthreads();  // the band before this one has been read
    fetch_band_of_words(x, image, f, tile);
    cp_async_wait<0>();
    if (!SPLIT) round_band(image, f, tile);
    for (int32_t row = 0; row < tile.rows; ++row) {
      cp_async_wait<STEM_STAGES - 2>();
      if (!SPLIT) {
        for (int32_t pixel = threadIdx.x / V; pixel < tile.across * 16; pixel += blockDim.x / V)
          round_to_tf32(shared + stage * (STAGE / 4) + gradient_offset(pixel, threadIdx.x % V));
      }
      __syncthreads();  // all copies have arrived, and the row before this one has been read
      fetch_next();
      for (int32_t piece = sharer; piece < tile.across; piece += f.sharers()) {
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int32_t pixel = piece * 16 + 8 * eight + t;
          const float* here = image + row * f.stride_height * f.pitch + pixel * pixel_stride;
          const float* gradient = gradients + stage * STAGE + pixel * PITCH + g;
          float a[2][4], b[TILES][2];
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              a[m][h] = here[element_offsets[m][h]];
              a[m][2 + h] = here[element_offsets[m][h] + 4 * pixel_stride];
            }
#pragma unroll
          for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int w = 0; w < 2; ++w) b[j][w] = gradient[w * 4 * PITCH + 8 * j];
          if constexpr (SPLIT)
            mma_tiles<true>(part, a, b);
          else
            mma_tiles<false>(sums, a, b);
        }
      }
      if constexpr (SPLIT) add_tiles(sums, part);
      stage = stage + 1 == STEM_STAGES ? 0 : stage + 1;
    }
  }
  write_part<TILES>(sums, gradients, partial, f, group, sharer, first);
}

template <bool SPLIT, int TILES>
void run_stem_conv_filter_fp32(const MbcCall& call, const StemConv& f, int64_t parts, bool accumulate) {
  float* partial = out<float>(call, 3);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(f.filters / TILES / 8));
  const unsigned threads = static_cast<unsigned>(32 * f.groups() * f.sharers());
  const int ring = STEM_STAGES * STEM_COLUMNS * (TILES * 8 + 8) * 4 + f.copy * 4;
  const int exchange = f.sharers() > 1 ? f.groups() * 64 * TILES * 16 : 0;
  MBC_LAUNCH_SHARED((stem_conv_filter_fp32<SPLIT, TILES>), grid, threads, ring > exchange ? ring : exchange,
                    call.stream, in<float>(call, 0), in<float>(call, 1), partial, f);
  FilterParts(f).add(call, partial, parts, accumulate);
}

}  // namespace mbc

extern "C" const char* mbc_stem_conv_backward_filter_fp32(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StemConvArguments>(call);
  if (a.type != MBC_FP32) return "this kernel takes fp32 only";
  const StemConv f(a, false, aligned(in<float>(call, 1), 16), aligned(in<float>(call, 0), 16));
  if (a.products == 3)
    run_stem_conv_filter_fp32<true, 4>(call, f, a.parts, a.accumulate != 0);
  else if (f.filters % 64 == 0)
    run_stem_conv_filter_fp32<false, 8>(call, f, a.parts, a.accumulate != 0);
  else
    run_stem_conv_filter_fp32<false, 4>(call, f, a.parts, a.accumulate != 0);
  return launched();
}
