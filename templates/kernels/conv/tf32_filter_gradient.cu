// Gradient of 3 x 3 filters at a stride of one, in tf32, channels last; channels and filters are multiples of 64.
//
// GEMM       M = 9 filter taps * 64 channels, N = 64 filters, K = output pixels, split over `parts` blocks (split-K)
//            that `add_parts` adds in order. wgmma takes tf32 only if K is contiguous, and pixels are not: the kernel
//            uses mma.sync.
// Tile       576 x 64 for a block, 48 x 64 for a warp; a step is one row of 32 output pixels. A block walks down
//            strips, which are 32 columns wide and `band` rows high.
// Warps      12, all equal: copy two rows ahead with cp.async, round their own copies to tf32, then run mma.sync
//            m16n8k8.
// Shared     5 rows of the image (three under the filter, two in flight) and 3 of gradients: 76,608 bytes. A pixel
//            takes 72 words, so that a warp's reads have no bank conflicts.
// Registers  96 accumulators a thread; 384 threads a block.
// Limit      half of the time is the loop of mma.sync, half is copying, rounding and waiting for rows (decision 029).
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for tile m = 0 .. 2 of its warp's three (16 channels of a tap):
//
//   A (image)       k = t      t + 4          D            filters   8n + 2t     8n + 2t + 1
//     channel g      a[m][0]   a[m][2]          channel g          d[m][n][0]    d[m][n][1]
//     channel g + 8  a[m][1]   a[m][3]          channel g + 8      d[m][n][2]    d[m][n][3]
#include "stem_conv_filter.cuh"
#include "tf32_filter_gradient_arguments.h"

namespace mbc {

constexpr int TAPS = 9, TAP_WARPS = 12, TAP_THREADS = 32 * TAP_WARPS;
// Equal to the constants in mbc/kernels/cuda/conv/tf32_filter_gradient.py: channels of the image and of gradients in a
// block.
constexpr int TAP_CHANNELS = 64;
constexpr int TAP_COLUMNS = 32;  // columns of the output in a strip; in that file, too
constexpr int TAP_TILES = TAPS * TAP_CHANNELS / 16 / TAP_WARPS;  // tiles of a warp
constexpr int TAP_AHEAD = 2, IMAGE_ROWS = 3 + TAP_AHEAD, GRADIENT_ROWS = 1 + TAP_AHEAD;
// A pixel takes 72 words, so that the words that a warp reads together, 8 of each of 4 pixels, are in different banks.
constexpr int TAP_PITCH = TAP_CHANNELS + 8, IMAGE_ROW = (TAP_COLUMNS + 2) * TAP_PITCH, GRADIENT_ROW = TAP_COLUMNS * TAP_PITCH;

// The position of a block: a strip, and `row` of the image, which has two rows more than the output.
struct TapStep {
  int64_t n, strip;  // image; number of the strip in all images
  int32_t x0, y0, rows, row;
};

struct Tf32Filter : ConvolutionShape {
  int32_t band, strips, bands;  // output rows of a strip; strips of an image across and down
  int64_t count;                // strips in all images
  bool wide;                    // operands are aligned for 16-byte copies

  Tf32Filter(const Tf32FilterArguments& a, bool whole)
      : ConvolutionShape(a), band(static_cast<int32_t>(a.band)),
        strips(static_cast<int32_t>(divide_up(a.out_width, TAP_COLUMNS))),
        bands(static_cast<int32_t>(divide_up(a.out_height, a.band))), count(a.rows * strips * bands), wide(whole) {}
  __device__ TapStep step(int64_t strip) const {
    const int32_t x0 = static_cast<int32_t>(strip % strips) * TAP_COLUMNS;
    const int32_t y0 = static_cast<int32_t>(strip / strips % bands) * band;
    return {strip / strips / bands, strip, x0, y0, min(band, out_height - y0), 0};
  }
  __device__ void advance(TapStep& at) const {
    if (++at.row == at.rows + 2) at = step(at.strip + gridDim.x);
  }
};

__global__ void __launch_bounds__(TAP_THREADS)
    tf32_filter_gradient(const float* __restrict__ x, const float* __restrict__ dy, float* __restrict__ partial,
                         Tf32Filter f) {
  constexpr int FOURS = TAP_CHANNELS / 4, PIXELS = TAP_THREADS / FOURS, N = TAP_CHANNELS / 8;
  MBC_DYNAMIC_SHARED(shared);
  float* image = reinterpret_cast<float*>(shared);
  float* gradients = image + IMAGE_ROWS * IMAGE_ROW;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t blocks = f.filters / TAP_CHANNELS;
  const int32_t channel = static_cast<int32_t>(blockIdx.y) / blocks * TAP_CHANNELS;
  const int32_t filter = static_cast<int32_t>(blockIdx.y) % blocks * TAP_CHANNELS;
  const int32_t pixel = threadIdx.x / FOURS, four = threadIdx.x % FOURS * 4;  // first copy of a thread

  // Calls `run` for each of a thread's 16 bytes of a step: its address in shared memory, its pixel of the row, and
  // whether the pixel is inside the image.
  const auto each_four = [&](const TapStep& at, int32_t number, auto run) {
    float* to = image + number % IMAGE_ROWS * IMAGE_ROW + pixel * TAP_PITCH + four;
#pragma unroll
    for (int i = 0; i < TAP_COLUMNS + 2; i += PIXELS)
      if (i + PIXELS <= TAP_COLUMNS + 2 || i + pixel < TAP_COLUMNS + 2) run(to + i * TAP_PITCH, i + pixel, true);
    if (at.row < 2) return;
    to = gradients + number % GRADIENT_ROWS * GRADIENT_ROW + pixel * TAP_PITCH + four;
#pragma unroll
    for (int i = 0; i < TAP_COLUMNS; i += PIXELS)
      if (i + PIXELS <= TAP_COLUMNS || i + pixel < TAP_COLUMNS) run(to + i * TAP_PITCH, i + pixel, false);
  };

  TapStep ahead = f.step(blockIdx.x), here = ahead;
  int32_t fetched = 0;
  const auto fetch_next = [&] {
    if (ahead.strip < f.count) {
      const int32_t y = ahead.y0 - f.pad_top + ahead.row, left = ahead.x0 - f.pad_left;
      const bool inside = y >= 0 && y < f.height;
      const float* of_image = x + ((ahead.n * f.height + y) * f.width + left) * f.channels + channel + four;
      const float* of_gradients =
          dy + ((ahead.n * f.out_height + ahead.y0 + ahead.row - 2) * f.out_width + ahead.x0) * f.filters + filter + four;
      each_four(ahead, fetched++, [&](float* to, int32_t column, bool is_image) {
        const bool there = is_image ? inside && left + column >= 0 && left + column < f.width
                                    : ahead.x0 + column < f.out_width;
        const float* from = is_image ? of_image + column * f.channels : of_gradients + column * f.filters;
        copy_vector(reinterpret_cast<uint4*>(to), there ? from : x, there, f.wide);
      });
      f.advance(ahead);
    }
    cp_async_commit();
  };

  int32_t tap_row[TAP_TILES], a_at[TAP_TILES];  // row of the image; offset from the beginning of that row
#pragma unroll
  for (int m = 0; m < TAP_TILES; ++m) {
    const int32_t tile = threadIdx.x / 32 * TAP_TILES + m, tap = tile / (TAP_CHANNELS / 16);
    tap_row[m] = tap / 3;
    a_at[m] = (t + tap % 3) * TAP_PITCH + tile % (TAP_CHANNELS / 16) * 16 + g;
  }
  float sums[TAP_TILES][N][4] = {};
#pragma unroll
  for (int s = 0; s < TAP_AHEAD; ++s) fetch_next();
  for (int32_t number = 0; here.strip < f.count; ++number, f.advance(here)) {
    cp_async_wait<TAP_AHEAD - 1>();
    each_four(here, number, [](float* at, int32_t, bool) {  // its own copies need no barrier
      round_to_tf32(reinterpret_cast<uint4*>(at));
    });
    __syncthreads();  // all rows have arrived, and the step before this one has been read
    fetch_next();
    if (here.row < 2) continue;
    const float* a_from[TAP_TILES];
#pragma unroll
    for (int m = 0; m < TAP_TILES; ++m)
      a_from[m] = image + (number + tap_row[m] - 2 + IMAGE_ROWS) % IMAGE_ROWS * IMAGE_ROW + a_at[m];
    const float* b_from = gradients + number % GRADIENT_ROWS * GRADIENT_ROW + t * TAP_PITCH + g;
    const int32_t columns = min(TAP_COLUMNS, f.out_width - here.x0);
    for (int32_t column = 0; column < columns; column += 8) {
      float a[TAP_TILES][4];
#pragma unroll
      for (int m = 0; m < TAP_TILES; ++m)
#pragma unroll
        for (int w = 0; w < 4; ++w) a[m][w] = a_from[m][(column + w / 2 * 4) * TAP_PITCH + w % 2 * 8];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float low = b_from[column * TAP_PITCH + n * 8], high = b_from[(column + 4) * TAP_PITCH + n * 8];
#pragma unroll
        for (int m = 0; m < TAP_TILES; ++m) mma_m16n8k8_tf32(sums[m][n], a[m], low, high);
      }
    }
  }

  // Stores taps and channels by filters, in the order that `stem_conv_filter_sum` reads.
  float* part = partial + static_cast<int64_t>(blockIdx.x) * TAPS * f.channels * f.filters;
#pragma unroll
  for (int m = 0; m < TAP_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t tile = threadIdx.x / 32 * TAP_TILES + m, tap = tile / (TAP_CHANNELS / 16);
      const int64_t part_row = static_cast<int64_t>(tap) * f.channels + channel + tile % (TAP_CHANNELS / 16) * 16 + g + 8 * h;
#pragma unroll
      for (int n = 0; n < N; ++n)
        store(part + part_row * f.filters + filter + n * 8 + 2 * t,
              Vec<float, 2>{{sums[m][n][2 * h], sums[m][n][2 * h + 1]}});
    }
}

}  // namespace mbc

extern "C" const char* mbc_convolution_backward_filter_tf32(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<Tf32FilterArguments>(call);
  const auto *x = in<float>(call, 0), *dy = in<float>(call, 1);
  float* partial = out<float>(call, 3);
  const Tf32Filter f(a, aligned(x, 16) && aligned(dy, 16));
  const dim3 grid(static_cast<unsigned>(a.parts),
                  static_cast<unsigned>(f.channels / TAP_CHANNELS * (f.filters / TAP_CHANNELS)));
  constexpr int SHARED = (IMAGE_ROWS * IMAGE_ROW + GRADIENT_ROWS * GRADIENT_ROW) * 4;
  MBC_LAUNCH_SHARED(tf32_filter_gradient, grid, TAP_THREADS, SHARED, call.stream, x, dy, partial, f);
  FilterParts(TAPS * f.channels, f.filters).add(call, partial, a.parts, a.accumulate != 0);
  return launched();
}
