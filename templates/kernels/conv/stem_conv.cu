// Stem convolution (a network's first, with at most seven channels), forward, in bf16 and fp16, channels last.
//
// GEMM       M = output pixels, N = filters, K = elements of a window: its rows one after another, each a run of
//            kernel_width * channels elements, padded only to whole words (stem_conv.cuh).
// Tile       a block computes a band of output rows, 64 columns wide, for 64, 32 or 16 filters. A warp computes 2 rows
//            x 16 columns at a time, with K = 16 in each step.
// Warps      4, all equal: they copy the band of the image, then run mma.sync m16n8k16.
// Shared     all weights of the block's filters as fragments, an offset and a mask for every second element of K, and
//            the band of the image, up to twice: pixels that start at an odd element are read as words from a copy that
//            is shifted by one element.
// Registers  at most 128 (4 blocks of 128 threads on a multiprocessor).
// Limit      A fragments are read word by word: 314 us, where bytes take 115 us (ResNet, batch 256, decision 011).
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for output row m = 0, 1 of the warp's two:
//
//   A (pixels)      k = 2t, 2t+1   2t+8, 2t+9          D            filter columns 2t   2t + 1
//     column g        a[m][0]        a[m][2]             column g        d[m][j][0]  d[m][j][1]
//     column g + 8    a[m][1]        a[m][3]             column g + 8    d[m][j][2]  d[m][j][3]
#include "stem_conv.cuh"

namespace mbc {

constexpr int STEM_WARPS = 4, STEM_THREADS = 32 * STEM_WARPS;

// Two elements of the weights of one filter as a word, zeros beyond the ends.
template <typename T>
__device__ inline uint32_t weight_word(const T* filter, const StemConv& f, int32_t k) {
  const int32_t r = k / f.padded_run, at = k - r * f.padded_run;
  if (r >= f.window_rows) return 0;
  const T* pair = filter + r * f.run + at;
  return word_of(pair[0], at + 1 < f.run ? pair[1] : from_float<T>(0.0f));
}

template <typename T, int TILES>
__global__ void __launch_bounds__(STEM_THREADS, 4)
    stem_conv(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, StemConv f) {
  MBC_DYNAMIC_SHARED(weights);                                                   // [step][pair of tiles][lane]
  uint2* k_offsets = reinterpret_cast<uint2*>(weights + f.steps * TILES / 2 * 32);  // every second K: offset from the
  T* image = reinterpret_cast<T*>(k_offsets + f.steps * 8);                         // pixel, mask of valid elements
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = blockIdx.y * TILES * 8;
  const int32_t earlier = (f.straight ? f.copy : 0) - 1;  // elements from the unshifted band to the shifted copy

  uint32_t* words = reinterpret_cast<uint32_t*>(weights);
  for (int i = threadIdx.x; i < f.steps * TILES * 64; i += STEM_THREADS) {
    const int half = i % 2, n = i / 4 % 32 / 4, pair = i / 128 % (TILES / 2), step = i / 128 / (TILES / 2);
    const int filter = first + filter_of<T, TILES>(2 * pair + i / 2 % 2, n);
    words[i] = weight_word(weight + static_cast<int64_t>(filter) * f.window_rows * f.run, f,
                           step * 16 + half * 8 + i / 4 % 4 * 2);
  }
  for (int i = threadIdx.x; i < f.steps * 8; i += STEM_THREADS) {
    const int32_t r = 2 * i / f.padded_run, at = 2 * i - r * f.padded_run;
    const bool inside = r < f.window_rows;
    k_offsets[i].x = inside ? static_cast<uint32_t>(f.row_offset(r) + at) / 2 : 0;
    k_offsets[i].y = !inside ? 0 : at + 1 < f.run ? 0xffffffffu : 0xffffu;
  }

  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const StemTile here = f.tile(number);
    __syncthreads();  // the band before this one has been read
    fetch_band(x, image, f, here);
    __syncthreads();

    for (int32_t piece = warp; piece < f.band / 2 * here.across; piece += STEM_WARPS) {
      const int32_t column = piece % here.across * 16 + g, row = piece / here.across * 2;
      const uint32_t* pixel[2][2];  // output row; column g or g + 8
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t at = (row + m) * f.stride_height * f.pitch + (column + 8 * h) * f.stride_width * f.channels;
          const bool odd = (f.lead + at) % 2 != 0;
          pixel[m][h] = reinterpret_cast<const uint32_t*>(image) + (f.lead + at + (odd ? earlier : 0)) / 2;
        }
      float sums[2][TILES][4] = {};
      for (int step = 0; step < f.steps; ++step) {
        const uint2 low = k_offsets[step * 8 + t], high = k_offsets[step * 8 + t + 4];
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          a[m][0] = pixel[m][0][low.x] & low.y;
          a[m][1] = pixel[m][1][low.x] & low.y;
          a[m][2] = pixel[m][0][high.x] & high.y;
          a[m][3] = pixel[m][1][high.x] & high.y;
        }
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
          const uint4 b = weights[(step * (TILES / 2) + i) * 32 + lane];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma_m16n8k16<T>(sums[m][2 * i], a[m], b.x, b.y);
            mma_m16n8k16<T>(sums[m][2 * i + 1], a[m], b.z, b.w);
          }
        }
      }
      write_pixels(sums, y, f, here, row, column, first);
    }
  }
}

template <typename T, int TILES>
void run_stem_conv(const MbcCall& call, const StemConv& f) {
  const int64_t most = multiprocessors() * 4;
  const dim3 grid(static_cast<unsigned>(f.tiles < most ? f.tiles : most), static_cast<unsigned>(f.filters / TILES / 8));
  const int shared = f.steps * (TILES / 2 * 32 * 16 + 64) + f.copy * (f.straight && f.shifted ? 4 : 2);
  MBC_LAUNCH_SHARED((stem_conv<T, TILES>), grid, STEM_THREADS, shared, call.stream, in<T>(call, 0), in<T>(call, 1),
                    out<T>(call, 2), f);
}

}  // namespace mbc

extern "C" const char* mbc_stem_conv(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StemConvArguments>(call);
  return with_working_type(a.type, [&](auto of) {
    using T = decltype(of);
    const StemConv f(a, true, aligned(out<T>(call, 2), 16), aligned(in<T>(call, 0), 16));
    if (f.filters % 64 == 0)
      run_stem_conv<T, 8>(call, f);
    else if (f.filters % 32 == 0)
      run_stem_conv<T, 4>(call, f);
    else
      run_stem_conv<T, 2>(call, f);
    return launched();
  });
}
