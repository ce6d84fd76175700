// Stem convolution (a network's first, with at most seven channels), forward, in fp32 (3xTF32) and tf32.
// Image and result are channels last.
//
// GEMM       M = output pixels, N = filters, K = elements of a window (stem_conv.cuh).
// Tile       as in stem_conv.cu: a band of output rows, 64 columns wide, of 32 filters (tf32 and at most 192 K: 64). A
//            warp computes 2 rows x 16 columns at a time, with K = 8 in each step. In fp32, accumulators of K = 32 are
//            added outside tensor cores, which truncate instead of rounding.
// Warps      4, all equal: copy the band with cp.async, then mma.sync m16n8k8 of tf32, three for one in fp32 (SPLIT).
// Shared     all weights of the block's filters as fragments, an offset for every element of K, and the band of the
//            image.
// Registers  at most 128 (4 blocks of 128 threads on a multiprocessor).
// Limit      A fragments are read word by word; in fp32 also splitting, and three mma.sync for one.
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for output row m = 0, 1 of the warp's two:
//
//   A (pixels)      k = t      t + 4          D            filter columns 2t   2t + 1
//     column g       a[m][0]   a[m][2]          column g        d[m][j][0]  d[m][j][1]
//     column g + 8   a[m][1]   a[m][3]          column g + 8    d[m][j][2]  d[m][j][3]
#include "stem_conv_fp32.cuh"

namespace mbc {

constexpr int STEM_WARPS_FP32 = 4, STEM_THREADS_FP32 = 32 * STEM_WARPS_FP32;
constexpr int WIDE_STEPS = 12;  // most steps of K = 16 at which weights of 64 filters leave room for other blocks

template <bool SPLIT, int TILES>
__global__ void __launch_bounds__(STEM_THREADS_FP32, 4)
    stem_conv_fp32(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ y, StemConv f) {
  MBC_DYNAMIC_SHARED(weights);  // [eights of K][pair of tiles][lane]
  uint2* k_offsets = reinterpret_cast<uint2*>(weights + f.steps * TILES * 32);  // of eight K: bytes to two fours
  float* image = reinterpret_cast<float*>(k_offsets + f.steps * 8);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = blockIdx.y * TILES * 8, eights = 2 * f.steps, length = f.window_rows * f.run;

  float* words = reinterpret_cast<float*>(weights);
  for (int i = threadIdx.x; i < f.steps * TILES * 128; i += STEM_THREADS_FP32) {
    const int n = i / 4 % 32 / 4, pair = i / 128 % (TILES / 2), eight = i / 128 / (TILES / 2);
    const int filter = first + filter_of<float, TILES>(2 * pair + i / 2 % 2, n);
    const KElement element(f, eight * 8 + i % 2 * 4 + i / 4 % 4);
    const float word = element.there ? weight[static_cast<int64_t>(filter) * length + element.in_filter(f)] : 0.0f;
    words[i] = SPLIT ? word : to_tf32(word);
  }
  for (int i = threadIdx.x; i < eights * 4; i += STEM_THREADS_FP32) {
    const int32_t element = i / 4 * 8 + i % 4;
    k_offsets[i] = {KElement(f, element).in_band(f) * 4, KElement(f, element + 4).in_band(f) * 4};
  }

  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const StemTile here = f.tile(number);
    __syncthreads();  // the band before this one has been read
    fetch_band_of_words(x, image, f, here);
    cp_async_wait<0>();
    if (!SPLIT) round_band(image, f, here);
    __syncthreads();

    for (int32_t piece = warp; piece < f.band / 2 * here.across; piece += STEM_WARPS_FP32) {
      const int32_t column = piece % here.across * 16 + g, row = piece / here.across * 2;
      const char* pixel[2][2];  // [output row][column g or g + 8]
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          pixel[m][h] = reinterpret_cast<const char*>(image + (row + m) * f.stride_height * f.pitch +
                                                      (column + 8 * h) * f.stride_width * f.channels);
      const auto mma_step = [&](int32_t eight, float(&into)[2][TILES][4]) {
        const uint2 at = k_offsets[eight * 4 + t];
        float a[2][4], b[TILES][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            a[m][h] = *reinterpret_cast<const float*>(pixel[m][h] + at.x);
            a[m][2 + h] = *reinterpret_cast<const float*>(pixel[m][h] + at.y);
          }
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
          const Vec<float, 4> pair = load<4>(words + ((eight * (TILES / 2) + i) * 32 + lane) * 4);
#pragma unroll
          for (int w = 0; w < 4; ++w) b[2 * i + w / 2][w % 2] = pair.v[w];
        }
        mma_tiles<SPLIT>(into, a, b);
      };
      float sums[2][TILES][4] = {};
      if constexpr (SPLIT) {
        float part[2][TILES][4] = {};
        for (int32_t eight = 0; eight < eights;) {
          const int32_t end = min(eight + SHORT_SUM, eights);
          for (; eight < end; eight += 2) {
            mma_step(eight, part);
            mma_step(eight + 1, part);
          }
          add_tiles(sums, part);
        }
      } else {
        for (int32_t eight = 0; eight < eights; ++eight) mma_step(eight, sums);
      }
      write_pixels(sums, y, f, here, row, column, first);
    }
  }
}

template <bool SPLIT, int TILES>
void run_stem_conv_fp32(const MbcCall& call, const StemConv& f) {
  const int shared = f.steps * (TILES * 512 + 64) + f.copy * 4;
  const int64_t rows = f.filters / TILES / 8;
  const int64_t most = divide_up(resident_blocks(stem_conv_fp32<SPLIT, TILES>, STEM_THREADS_FP32, shared), rows);
  const dim3 grid(static_cast<unsigned>(f.tiles < most ? f.tiles : most), static_cast<unsigned>(rows));
  MBC_LAUNCH_SHARED((stem_conv_fp32<SPLIT, TILES>), grid, STEM_THREADS_FP32, shared, call.stream, in<float>(call, 0),
                    in<float>(call, 1), out<float>(call, 2), f);
}

}  // namespace mbc

extern "C" const char* mbc_stem_conv_fp32(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StemConvArguments>(call);
  if (a.type != MBC_FP32) return "this kernel takes fp32 only";
  const StemConv f(a, true, aligned(out<float>(call, 2), 16), aligned(in<float>(call, 0), 16));
  if (a.products == 3)
    run_stem_conv_fp32<true, 4>(call, f);
  else if (f.filters % 64 == 0 && f.steps <= WIDE_STEPS)
    run_stem_conv_fp32<false, 8>(call, f);
  else
    run_stem_conv_fp32<false, 4>(call, f);
  return launched();
}
