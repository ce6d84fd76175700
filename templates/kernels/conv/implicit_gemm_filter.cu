// Filter gradients of convolutions with windows of any size and stride along one to three axes, in bf16 and fp16,
// channels last, by mma.sync (decision 091).
//
// GEMM       M = filters, N = columns (filter taps x channels), K = output pixels, split over `parts` blocks (split-K)
//            that `add_parts` adds in order; a single part is written to the gradient itself.
// Tile       128 or 64 filters x 128 or 64 columns: 128 threads, each warp a quarter of it, by m16n8k16.
// Pipeline   three stages of K = 32 pixels, copied by cp.async two stages ahead (mma_gemm.cuh). A thread copies eight
//            columns, which have one tap, and eight filters of some pixels. Each lane locates one pixel of a stage.
// Banks      rows of a stage are pixels, K of both operands: ldmatrix.trans reads the rows of its 8 x 8 matrices from
//            different banks, by the swizzle of mma_gemm.cuh.
// Shared     three stages of 16,384 bytes at most: 49,152 bytes, so that two blocks fit into 100 KiB.
// Registers  128 sums a thread; at most 255, so that two blocks are resident.
// Limit      tensor cores: 64 x 64 results of a warp read 8 KiB of shared memory for 64 mma.sync. Bytes for most 1x1 filters.
#include "implicit_gemm.cuh"
#include "split_k.cuh"

namespace mbc {

constexpr int FILTER_THREADS = 128, FILTER_PIXELS = MMA_CHANNELS, FILTER_STAGES = 3;  // FILTER_PIXELS: K of a stage

template <int FILTERS_, int COLUMNS_>
struct FilterTile {
  static constexpr int FILTERS = FILTERS_, COLUMNS = COLUMNS_;
  static constexpr int GRADIENT_BYTES = FILTER_PIXELS * FILTERS * 2;
  static constexpr int STAGE_BYTES = GRADIENT_BYTES + FILTER_PIXELS * COLUMNS * 2;
  static constexpr int M = FILTERS / 32, N = COLUMNS / 32;  // 16 filters and 16 columns of a warp, which has a quarter
  // A warp's sums: of the m-th 16 filters and n-th eight columns, as in mma_m16n8k16.
  using Sums = float[M][2 * N][4];
};

// A thread's copies of [pixels, WIDTH] to a stage: eight elements of every STEP-th pixel.
template <int WIDTH>
struct PixelRows {
  static constexpr int EIGHTS = WIDTH / 8, STEP = FILTER_THREADS / EIGHTS;
  int32_t eight = threadIdx.x % EIGHTS, first = threadIdx.x / EIGHTS, to = wide_row_offset<WIDTH * 2>(first, eight);

  // Calls `copy` with an address in the stage and the number of the pixel.
  template <typename Copy>
  __device__ void each(char* stage, const Copy& copy) const {
#pragma unroll
    for (int i = 0; i < FILTER_PIXELS; i += STEP) copy(stage + to + i * WIDTH * 2, first + i);
  }
};

struct FilterGemm {
  WindowPixels window;
  int32_t filters, columns, tiles, stages, parts;  // stages: of all parts
  bool accumulate;                                 // adds to what is there

  explicit FilterGemm(const ImplicitGemmFilterArguments& a)
      : window(a), filters(narrow(a.filters)), columns(window.taps() * window.channels), tiles(narrow(a.tiles)),
        stages(narrow(a.stages)), parts(narrow(a.blocks)), accumulate(parts == 1 && a.accumulate != 0) {}
  // First stage of a part.
  __device__ int32_t begin(int32_t part) const {
    return static_cast<int32_t>(static_cast<int64_t>(stages) * part / parts);
  }
};

// The rows of 8 x 8 matrices whose addresses this thread supplies to ldmatrix: of gradients in the order (pixels,
// filters) = low low, low high, high low, high high; of the image (pixels, columns) = low low, high low, low high, high
// high.
template <typename T, typename Tile>
struct FilterFragments {
  static constexpr int M = Tile::M, N = Tile::N;
  int32_t warp_filter, warp_column, a_at[M], b_at[N];
  struct Step {
    uint32_t a[M][4], b[N][4];
  };
  __device__ FilterFragments() {
    const int32_t lane = threadIdx.x % 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
    warp_filter = warp / 2 * M * 16;
    warp_column = warp % 2 * N * 16;
#pragma unroll
    for (int m = 0; m < M; ++m)
      a_at[m] = wide_row_offset<Tile::FILTERS * 2>(lane / 16 * 8 + lane % 8, warp_filter / 8 + 2 * m + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < N; ++n)
      b_at[n] = Tile::GRADIENT_BYTES + wide_row_offset<Tile::COLUMNS * 2>(lane % 16, warp_column / 8 + 2 * n + lane / 16);
  }
  __device__ void load(Step& to, const char* stage, int step) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      ldmatrix_x4_trans(to.b[n], reinterpret_cast<const uint4*>(stage + b_at[n] + step * 16 * Tile::COLUMNS * 2));
#pragma unroll
    for (int m = 0; m < M; ++m)
      ldmatrix_x4_trans(to.a[m], reinterpret_cast<const uint4*>(stage + a_at[m] + step * 16 * Tile::FILTERS * 2));
  }
  __device__ static void multiply(typename Tile::Sums& sums, const Step& step) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) mma_m16n8k16<T>(sums[m][n], step.a[m], step.b[n / 2][n % 2 * 2], step.b[n / 2][n % 2 * 2 + 1]);
  }
};

template <typename Tile, typename T>
__global__ void __launch_bounds__(FILTER_THREADS, 2)
    implicit_gemm_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ dw, FilterGemm f) {
  MBC_DYNAMIC_SHARED(shared);
  const int32_t part = static_cast<int32_t>(blockIdx.x) / f.tiles, tile = static_cast<int32_t>(blockIdx.x) % f.tiles;
  const int32_t lane = threadIdx.x % 32;
  const int32_t across = (f.columns + Tile::COLUMNS - 1) / Tile::COLUMNS;
  const int32_t tile_filter = tile / across * Tile::FILTERS, tile_column = tile % across * Tile::COLUMNS;
  const WindowPixels& window = f.window;

  // The filters and the column that this thread copies; `taps`: the bits of `inside` that its tap needs, or impossible.
  const PixelRows<Tile::FILTERS> gradients;
  const PixelRows<Tile::COLUMNS> image;
  const int32_t filter = tile_filter + gradients.eight * 8, column = tile_column + image.eight * 8;
  const int32_t tap = column / window.channels, line = tap / window.x.kernel, plane = line / window.y.kernel;
  const int32_t at_x = tap - line * window.x.kernel, at_y = line - plane * window.y.kernel;
  const int32_t offset = ((plane * window.y.size + at_y) * window.x.size + at_x) * window.channels + column - tap * window.channels;
  const uint32_t taps = column < f.columns ? WindowPixels::needs(plane, at_y, at_x) : ~0u;
  int32_t first_pixel = f.begin(part) * FILTER_PIXELS;
  int32_t left_stages = f.begin(part + 1) - f.begin(part);
  const int32_t count = left_stages;
  const auto start = [&](char* stage) {
    const bool there = left_stages > 0;
    const MmaPixel located = window.locate(first_pixel + lane);
    const int32_t left = there && filter < f.filters ? window.pixels - first_pixel : 0, first_gradient = first_pixel * f.filters + filter;
    gradients.each(stage, [&](char* to, int32_t pixel) {
      copy_eight(to, dy, first_gradient + pixel * f.filters, pixel < left);
    });
    image.each(stage + Tile::GRADIENT_BYTES, [&](char* to, int32_t pixel) {
      const uint32_t inside = __shfl_sync(0xffffffffu, located.inside, pixel);
      copy_eight(to, x, __shfl_sync(0xffffffffu, located.first, pixel) + offset, there && (inside & taps) == taps);
    });
  };
  const MmaAhead ahead{start, [&] {
                         first_pixel += FILTER_PIXELS;
                         --left_stages;
                       }};

  const FilterFragments<T, Tile> fragments;
  const int32_t warp_filter = fragments.warp_filter, warp_column = fragments.warp_column;
  constexpr int M = Tile::M, N = Tile::N;
  typename Tile::Sums sums = {};
  MmaStages<FILTER_STAGES, Tile::STAGE_BYTES> ring{reinterpret_cast<char*>(shared)};
  ring.start_first(ahead);
  ring.multiply(count, fragments, sums, ahead);
  cp_async_wait<0>();


#pragma unroll
  for (int m = 0; m < 2 * M; ++m) {
    const int32_t result_filter = tile_filter + warp_filter + m * 8 + lane / 4;
    if (result_filter >= f.filters) break;
    float* const row = dw + (static_cast<int64_t>(part) * f.filters + result_filter) * f.columns;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const int32_t result_column = tile_column + warp_column + n * 8 + lane % 4 * 2;
      if (result_column >= f.columns) break;
      Vec<float, 2> sum{sums[m / 2][n][m % 2 * 2], sums[m / 2][n][m % 2 * 2 + 1]};
      if (f.accumulate)
        for (int e = 0; e < 2; ++e) sum.v[e] += row[result_column + e];
      store(row + result_column, sum);
    }
  }
}

}  // namespace mbc

// Accesses: image, gradient of the result, gradient of the filters, and a workspace for several parts.
extern "C" const char* mbc_implicit_gemm_backward_filter(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ImplicitGemmFilterArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<ImplicitGemmFilterArguments>(call);
    const FilterGemm f(a);
    float *const dw = out<float>(call, 2), *const target = f.parts > 1 ? out<float>(call, 3) : dw;
    const auto run = [&](auto tile) {
      using Tile = decltype(tile);
      MBC_LAUNCH_SHARED((implicit_gemm_filter<Tile, T>), static_cast<unsigned>(f.parts * f.tiles), FILTER_THREADS,
                        FILTER_STAGES * Tile::STAGE_BYTES, call.stream, in<T>(call, 0), in<T>(call, 1), target, f);
    };
    if (a.tile_filters == 64)
      a.tile_columns == 64 ? run(FilterTile<64, 64>()) : run(FilterTile<64, 128>());
    else
      a.tile_columns == 64 ? run(FilterTile<128, 64>()) : run(FilterTile<128, 128>());
    if (f.parts > 1) add_parts(call.stream, target, dw, int64_t{f.filters} * f.columns, f.parts, a.accumulate != 0);
  });
}
