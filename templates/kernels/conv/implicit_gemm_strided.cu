// Data gradients of strided convolutions with windows along one to three axes, in bf16 and fp16, channels last, by mma.sync
// (decision 099).
//
// Classes    results whose positions are equal modulo the stride. A class is a convolution of the gradient at a stride of
//            one, by the taps that reach it: every stride-th one along an axis. Results that no tap reaches are zeros.
// GEMM       of each class: M = its results, N = channels of the result, K = its taps x channels of the gradient that is
//            read. If `together`, the classes along a line are one GEMM: N = neighbouring pixels x channels. Their taps are
//            neighbours in memory, and so are their results; a tap beyond the window is zeros.
// Tile       of one class, by the main loop of mma_gemm.cuh: 128 results x 128 or 64 of N.
// Blocks     walk over regions of as many tiles of every class as there are blocks, class after class, those with most
//            taps first. So blocks have equal work, and a region's gradients are read again while they are in the L2 cache.
//            The number of blocks is independent of the GPU.
// Registers  at most 255 or 168, so that two or three blocks are resident.
// Limit      tensor cores, and the L2 cache for few channels.
#include "implicit_gemm.cuh"
#include "implicit_gemm_strided_arguments.h"
#include "mma_conv.cuh"

namespace mbc {

// One axis of the gradient, for all classes. Each has `count` results, of which the last may be outside the image.
struct GradientAxis {
  int32_t size, result, kernel, stride, pad, classes;
  int32_t taps, longer;         // of the first `longer` classes; others have one tap less
  int32_t begin, first, count;  // of the first class: its first result, the gradient there, and the number of results
  Divisor lines;                // divides by `count`

  GradientAxis(int64_t size_, int64_t result_, int64_t kernel_, int64_t stride_, int64_t reversed_pad, int64_t together)
      : size(narrow(size_)), result(narrow(result_)), kernel(narrow(kernel_)), stride(narrow(stride_)),
        pad(kernel - 1 - narrow(reversed_pad)), classes(stride / narrow(together)), taps((kernel - 1) / stride + 1),
        longer((kernel - 1) % stride + 1), begin(-(pad % stride)), first(pad / stride),
        count((result - 1 - (classes == 1 ? begin : 0)) / stride + 1), lines(count) {}
};

// One axis of one class.
struct AxisClass {
  const GradientAxis& axis;
  int32_t number = 0;

  // The first result is inside. Only that of classes together may be outside, to the left.
  __device__ int32_t wraps() const { return axis.classes > 1 && axis.begin + number < 0; }
  __device__ int32_t result(int32_t at) const { return axis.begin + number + (at + wraps()) * axis.stride; }
  __device__ int32_t taps() const { return axis.taps - (number < axis.longer ? 0 : 1); }
  // The gradient under the first of the reversed taps of a result; a bit for each tap that is inside.
  __device__ int32_t first(int32_t at) const { return at + axis.first + wraps() - (taps() - 1); }
  __device__ uint32_t inside(int32_t first) const {
    const int32_t from = max(-first, 0), to = min(axis.size - first, taps());
    return from < to ? (1u << to) - (1u << from) : 0;
  }
  // The number of a tap of the class among the reversed taps of the window.
  __device__ int32_t tap(int32_t k) const { return axis.kernel - 1 - number - (taps() - 1 - k) * axis.stride; }
};

struct StridedGradient {
  GradientAxis z, y, x;
  int32_t channels, filters, together, width;  // filters: channels of the result; width: N
  int32_t across, pixels, tiles;               // results and tiles of a class

  StridedGradient(const ImplicitGemmStridedArguments& a, int tile_filters)
      : z(a.depth, a.out_depth, a.kernel_depth, a.stride_depth, a.pad_front, 1),
        y(a.height, a.out_height, a.kernel_height, a.stride_height, a.pad_top, 1),
        x(a.width, a.out_width, a.kernel_width, a.stride_width, a.pad_left, a.together), channels(narrow(a.channels)),
        filters(narrow(a.filters)), together(narrow(a.together)), width(filters * together),
        across(narrow(divide_up(width, tile_filters))), pixels(narrow(a.rows * z.count * y.count * x.count)),
        tiles(narrow(divide_up(pixels, MMA_PIXELS))) {}
};

// The tiles of a block, one after another, and the pixels of the current tile's class for mma_gemm.cuh.
struct ClassTiles {
  const StridedGradient& f;
  int32_t step, tile, region = 0;  // tile: from the region's first one on
  AxisClass z{f.z}, y{f.y}, x{f.x};

  __device__ ClassTiles(const StridedGradient& f_, int32_t block, int32_t step_) : f(f_), step(step_), tile(block - step) { next(); }
  __device__ bool is_there() const { return region < f.tiles; }
  __device__ void next() {
    tile += step;
    for (int32_t many; is_there() && tile >= (many = min(step, f.tiles - region));) {
      tile -= many;
      if (++x.number < x.axis.classes) continue;
      x.number = 0;
      if (++y.number < y.axis.classes) continue;
      y.number = 0;
      if (++z.number < z.axis.classes) continue;
      z.number = 0;
      region += step;
    }
  }
  __device__ int32_t first_pixel() const { return (region + tile) * MMA_PIXELS; }
  __device__ int32_t class_taps() const { return z.taps() * y.taps() * x.taps(); }
  // A class without taps has one stage, of zeros.
  __device__ int32_t stages() const { return max(class_taps() * ((f.channels + MMA_CHANNELS - 1) / MMA_CHANNELS), 1); }
  struct Place {
    int32_t image, z, y, x;
  };
  __device__ Place place(int32_t pixel) const {
    const int32_t line = f.x.lines(pixel), plane = f.y.lines(line), image = f.z.lines(plane);
    return {image, plane - image * f.z.count, line - plane * f.y.count, pixel - line * f.x.count};
  }
  __device__ int32_t taps() const { return f.z.kernel * f.y.kernel * f.x.kernel; }
  __device__ uint32_t needs(const KPosition& k) const { return WindowPixels::needs(k.z, k.y, k.x); }
  __device__ MmaPixel locate(int32_t pixel) const {
    const Place at = place(pixel);
    const int32_t at_x = is_there() && pixel < f.pixels ? x.first(at.x) : f.x.size;  // right of all gradients
    const int32_t at_y = y.first(at.y), at_z = z.first(at.z);
    return {(((at.image * f.z.size + at_z) * f.y.size + at_y) * f.x.size + at_x) * f.channels,
            x.inside(at_x) | y.inside(at_y) << WindowPixels::BITS | z.inside(at_z) << 2 * WindowPixels::BITS};
  }
  // The columns of weights under a tap, those of neighbouring taps included.
  __device__ int32_t columns(const KPosition& k) const {
    if (class_taps() == 0) return 0;
    return min(f.x.kernel - (x.taps() - 1 - k.x) * f.x.stride, f.together) * f.filters;
  }
};

// A thread's share in the copies of one tile after another.
template <typename Tile, typename T>
struct GradientCopies {
  using Gemm = MmaGemm<T, ClassTiles, true>;
  Gemm& gemm;
  MmaCopies<Tile, Gemm> copies;
  int32_t column;  // first of eight columns of weights
  KPosition k;

  __device__ GradientCopies(Gemm& gemm_, int32_t first_column)
      : gemm(gemm_), copies(gemm, 0), column(first_column + static_cast<int32_t>(threadIdx.x) % copies.EIGHTS * 8) {
    const int32_t taps = gemm.pixels.taps();
#pragma unroll
    for (int i = 0; i < copies.WEIGHTS; ++i)
      copies.weight[i] = ((copies.k_row() + i * copies.K_ROWS) * taps + taps - 1) * gemm.filters + column;
    begin();
  }
  // The four threads of a quad copy channels of the same pixels: each locates one of them.
  __device__ void begin() {
    static_assert(copies.PIXELS == 4);
    const int32_t thread = threadIdx.x;
    const MmaPixel located = gemm.pixels.locate(gemm.pixels.first_pixel() + thread / 4 + thread % 4 * copies.ROWS);
#pragma unroll
    for (int i = 0; i < copies.PIXELS; ++i) {
      const int32_t lane = thread % 32 / 4 * 4 + i;
      copies.pixel[i] = {__shfl_sync(0xffffffffu, located.first, lane) + copies.channel, __shfl_sync(0xffffffffu, located.inside, lane)};
    }
    k = {};
    begin_tap();
  }
  __device__ void begin_tap() {
    const ClassTiles& at = gemm.pixels;
    k.tap = (at.z.tap(k.z) * at.f.y.kernel + at.y.tap(k.y)) * at.f.x.kernel + at.x.tap(k.x);
    k.offset = ((k.z * at.f.y.size + k.y) * at.f.x.size + k.x) * at.f.channels;
    copies.filters_left = at.columns(k) - column;
  }
  __device__ void start(char* stage) const { copies.start(stage, k, gemm.pixels.is_there()); }
  __device__ void advance() {
    k.channel += MMA_CHANNELS;
    k.offset += MMA_CHANNELS;
    if (gemm.pixels.class_taps() > 0) {
      if (k.channel < gemm.channels) return;
      k.channel = 0;
      if (++k.x < gemm.pixels.x.taps()) return begin_tap();
      k.x = 0;
      if (++k.y < gemm.pixels.y.taps()) return begin_tap();
      k.y = 0;
      if (++k.z < gemm.pixels.z.taps()) return begin_tap();
    }
    gemm.pixels.next();  // that was the last stage of the tile; a class without taps has one
    begin();
  }
};

template <typename Tile, typename T>
__global__ void __launch_bounds__(MMA_THREADS, Tile::BLOCKS)
    implicit_gemm_strided(const T* __restrict__ dy, const T* __restrict__ weights, T* __restrict__ dx, const __grid_constant__ StridedGradient f) {
  MBC_DYNAMIC_SHARED(shared);
  const int32_t block = static_cast<int32_t>(blockIdx.x) / f.across, step = static_cast<int32_t>(gridDim.x) / f.across;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) % f.across * Tile::FILTERS;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int32_t warp_pixel = warp / MMA_WARPS_ACROSS * MMA_WARP_PIXELS;
  const int32_t warp_column = warp % MMA_WARPS_ACROSS * Tile::WARP_FILTERS;
  ClassTiles tiles(f, block, step);
  typename GradientCopies<Tile, T>::Gemm gemm{dy, weights, tiles, f.channels, f.filters};
  GradientCopies<Tile, T> gradients(gemm, first_column);
  const MmaAhead ahead{[&](char* stage) { gradients.start(stage); }, [&] { gradients.advance(); }};
  const MmaFragments<T, Tile, true> fragments(warp_pixel, warp_column);
  MmaStages<Tile::STAGES, Tile::STAGE_BYTES> ring{reinterpret_cast<char*>(shared)};
  ring.start_first(ahead);
  for (; tiles.is_there(); tiles.next()) {
    typename Tile::Sums sums = {};
    ring.multiply(tiles.stages(), fragments, sums, ahead);
    // A lane locates two of the warp's 64 results: its pixel along the line, and its first element.
    int32_t at_x[2], element[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t pixel = tiles.first_pixel() + warp_pixel + i * 32 + lane;
      const auto at = tiles.place(pixel);
      const int32_t z = tiles.z.result(at.z), y = tiles.y.result(at.y), x = tiles.x.result(at.x);
      at_x[i] = pixel < f.pixels && z < f.z.result && y < f.y.result ? x : f.x.result;
      element[i] = (((at.image * f.z.result + z) * f.y.result + y) * f.x.result + x) * f.filters;
    }
#pragma unroll
    for (int i = 0; i < Tile::GROUPS * MMA_ROWS; ++i) {
      const int32_t column = first_column + warp_column + i / MMA_ROWS * 32 + lane % 4 * 8, from = i % 4 * 8 + lane / 4;
      const int32_t x = __shfl_sync(0xffffffffu, at_x[i % MMA_ROWS / 4], from) + column / f.filters;
      const int32_t first = __shfl_sync(0xffffffffu, element[i % MMA_ROWS / 4], from);
      const auto result = rounded_result<Tile, T, true>(sums, i / MMA_ROWS, i % MMA_ROWS);
      if (column < f.width && x >= 0 && x < f.x.result) store_held(dx + first + column, result);
    }
  }
}

}  // namespace mbc

// Accesses: gradient of the features, weights, gradient of the image. Its channels are the `filters` of the arguments.
extern "C" const char* mbc_implicit_gemm_strided_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ImplicitGemmStridedArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<ImplicitGemmStridedArguments>(call);
    const auto run = [&](auto tile) {
      using Tile = decltype(tile);
      const StridedGradient f(a, Tile::FILTERS);
      MBC_LAUNCH_SHARED((implicit_gemm_strided<Tile, T>), static_cast<unsigned>(a.blocks * f.across), MMA_THREADS,
                        Tile::STAGES_BYTES, call.stream, in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), f);
    };
    if ((a.filters * a.together - 1) % 128 < 64)
      run(MmaTile<64, 4, 3>());
    else
      run(MmaTile<128, 3, 2>());
  });
}
