// The gradient of 3 x 3 filters in tf32, channels last, where both sides have channels by the 64: a warp for each of the
// nine places of a filter makes its 64 x 64 products, summed over pixels.
//
// Libraries have fast kernels for tf32 only where the terms of a sum lie next to each other, which are pixels here. A
// block goes down strips of the image: three of its rows and one of gradients are in shared memory, and the next ones on
// their way.
#include "mbc_few_channels_filter.cuh"

struct TapsArguments {
  int64_t images;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t filters;
  int64_t out_height;
  int64_t out_width;
  int64_t pad_top;
  int64_t pad_left;
  int64_t band;   // output rows that a block makes of a strip
  int64_t parts;  // blocks that share out the strips
  int64_t accumulate;
};

namespace mbc {

constexpr int TAPS = 9, TAP_THREADS = 32 * TAPS;
constexpr int TAP_CHANNELS = 64;  // of a block, of the image and of gradients; as in mbc/kernels/own/taps.py
constexpr int TAP_COLUMNS = 32;   // of the output; likewise
constexpr int TAP_AHEAD = 2, IMAGE_ROWS = 3 + TAP_AHEAD, GRADIENT_ROWS = 1 + TAP_AHEAD;
// A pixel takes 72 words, so that those that a warp reads at once, 8 of each of 4 pixels, are in different banks.
constexpr int TAP_PITCH = TAP_CHANNELS + 8, IMAGE_ROW = (TAP_COLUMNS + 2) * TAP_PITCH, GRADIENT_ROW = TAP_COLUMNS * TAP_PITCH;

// Where a block is: `row` of the image under a tile of the output, of which there are two more than of the output.
struct TapStep {
  int64_t n, strip;  // strips in all images, one behind another
  int32_t x0, y0, rows, row;
};

struct Taps {
  int32_t channels, height, width, filters, out_height, out_width, pad_top, pad_left, band;
  int32_t strips, bands;  // of an image: across and down
  int64_t count;          // of strips in all images
  bool wide;              // everything takes vectors

  Taps(const TapsArguments& a, bool whole)
      : channels(static_cast<int32_t>(a.channels)), height(static_cast<int32_t>(a.height)),
        width(static_cast<int32_t>(a.width)), filters(static_cast<int32_t>(a.filters)),
        out_height(static_cast<int32_t>(a.out_height)), out_width(static_cast<int32_t>(a.out_width)),
        pad_top(static_cast<int32_t>(a.pad_top)), pad_left(static_cast<int32_t>(a.pad_left)),
        band(static_cast<int32_t>(a.band)), strips(static_cast<int32_t>(divide_up(a.out_width, TAP_COLUMNS))),
        bands(static_cast<int32_t>(divide_up(a.out_height, a.band))), count(a.images * strips * bands), wide(whole) {}
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
    taps_filter(const float* __restrict__ x, const float* __restrict__ dy, float* __restrict__ partial, Taps f) {
  constexpr int FOURS = TAP_CHANNELS / 4, M = TAP_CHANNELS / 16, N = TAP_CHANNELS / 8;
  MBC_DYNAMIC_SHARED(shared);
  float* image = reinterpret_cast<float*>(shared);
  float* gradients = image + IMAGE_ROWS * IMAGE_ROW;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tap = threadIdx.x / 32;
  const int32_t blocks = f.filters / TAP_CHANNELS;
  const int32_t channel = static_cast<int32_t>(blockIdx.y) / blocks * TAP_CHANNELS;
  const int32_t filter = static_cast<int32_t>(blockIdx.y) % blocks * TAP_CHANNELS;

  // What a thread does with each of its 16 bytes of a step's rows: (where they lie in shared memory, where they come
  // from, whether that exists).
  const auto each_four = [&](const TapStep& at, int64_t number, auto run) {
    const int32_t y = at.y0 - f.pad_top + at.row, out_y = at.y0 + at.row - 2;
    float* to = image + number % IMAGE_ROWS * IMAGE_ROW;
    for (int32_t i = threadIdx.x; i < (TAP_COLUMNS + 2) * FOURS; i += TAP_THREADS) {
      const int32_t column = i / FOURS, four = i % FOURS * 4, image_x = at.x0 - f.pad_left + column;
      const bool there = y >= 0 && y < f.height && image_x >= 0 && image_x < f.width;
      const int64_t pixel = there ? (at.n * f.height + y) * f.width + image_x : 0;
      run(to + column * TAP_PITCH + four, x + pixel * f.channels + channel + four, there);
    }
    if (at.row < 2) return;
    to = gradients + number % GRADIENT_ROWS * GRADIENT_ROW;
    for (int32_t i = threadIdx.x; i < TAP_COLUMNS * FOURS; i += TAP_THREADS) {
      const int32_t column = i / FOURS, four = i % FOURS * 4, out_x = at.x0 + column;
      const bool there = out_x < f.out_width;
      const int64_t pixel = there ? (at.n * f.out_height + out_y) * f.out_width + out_x : 0;
      run(to + column * TAP_PITCH + four, dy + pixel * f.filters + filter + four, there);
    }
  };

  TapStep ahead = f.step(blockIdx.x), here = ahead;
  int64_t fetched = 0;
  const auto fetch_next = [&] {
    if (ahead.strip < f.count) {
      each_four(ahead, fetched++, [&](float* to, const float* from, bool there) {
        copy_vector(reinterpret_cast<uint4*>(to), from, there, f.wide);
      });
      f.advance(ahead);
    }
    end_of_copies();
  };

  float sums[M][N][4] = {};
#pragma unroll
  for (int s = 0; s < TAP_AHEAD; ++s) fetch_next();
  for (int64_t number = 0; here.strip < f.count; ++number, f.advance(here)) {
    wait_for_copies<TAP_AHEAD - 1>();
    each_four(here, number, [](float* at, const float*, bool) {  // its own, which it need not wait for others to see
      Vec<float, 4> four = load<4>(at);
#pragma unroll
      for (int e = 0; e < 4; ++e) four.v[e] = to_tf32(four.v[e]);
      store(at, four);
    });
    __syncthreads();  // everybody's rows have arrived, and the step before this one is done with
    fetch_next();
    if (here.row < 2) continue;
    const float* a_from = image + (number + tap / 3 - 2 + IMAGE_ROWS) % IMAGE_ROWS * IMAGE_ROW + (t + tap % 3) * TAP_PITCH + g;
    const float* b_from = gradients + number % GRADIENT_ROWS * GRADIENT_ROW + t * TAP_PITCH + g;
    const int32_t columns = min(TAP_COLUMNS, f.out_width - here.x0);
    for (int32_t column = 0; column < columns; column += 8) {
      const float *a_at = a_from + column * TAP_PITCH, *b_at = b_from + column * TAP_PITCH;
      float a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int w = 0; w < 4; ++w) a[m][w] = a_at[w / 2 * 4 * TAP_PITCH + m * 16 + w % 2 * 8];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float low = b_at[n * 8], high = b_at[4 * TAP_PITCH + n * 8];
#pragma unroll
        for (int m = 0; m < M; ++m) multiply_add_tf32(sums[m][n], a[m], low, high);
      }
    }
  }

  // Terms by filters, as `few_channels_filter_sum` takes them.
  float* part = partial + static_cast<int64_t>(blockIdx.x) * TAPS * f.channels * f.filters;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t term = static_cast<int64_t>(tap) * f.channels + channel + m * 16 + g + 8 * h;
#pragma unroll
      for (int n = 0; n < N; ++n)
        store(part + term * f.filters + filter + n * 8 + 2 * t,
              Vec<float, 2>{{sums[m][n][2 * h], sums[m][n][2 * h + 1]}});
    }
}

}  // namespace mbc

extern "C" const char* mbc_convolution_taps_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<TapsArguments>(call);
  const auto *x = in<float>(call, 0), *dy = in<float>(call, 1);
  float* partial = out<float>(call, 3);
  const Taps f(a, aligned(x, 16) && aligned(dy, 16));
  const dim3 grid(static_cast<unsigned>(a.parts),
                  static_cast<unsigned>(f.channels / TAP_CHANNELS * (f.filters / TAP_CHANNELS)));
  constexpr int SHARED = (IMAGE_ROWS * IMAGE_ROW + GRADIENT_ROWS * GRADIENT_ROW) * 4;
  MBC_LAUNCH_SHARED(taps_filter, grid, TAP_THREADS, SHARED, call.stream, x, dy, partial, f);
  add_parts(call.stream, partial, out<float>(call, 2), FilterParts(TAPS * f.channels, f.filters), a.parts,
            a.accumulate != 0);
  return launched();
}
