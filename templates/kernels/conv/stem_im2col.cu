// Stem convolution (a network's first, with at most seven channels), forward, in bf16 and fp16, channels last, on
// Hopper's tensor cores; optionally with batch statistics in the epilogue. Filters are a multiple of 64.
//
// GEMM       M = filters, N = output pixels, K = elements of a window (stem_im2col.cuh).
// Tile       64 filters x 64 columns of an output row, one row of a band after another; K = 16 in each step.
// Warps      5. A warpgroup copies the windows of a band to shared memory, then issues wgmma m64n64k16, weights (A) in
//            registers, windows (B) in shared memory. A thread of the last warp copies bands of the image (TMA), one
//            ahead.
// Epilogue   results are transposed in shared memory (stmatrix.trans) and stored from there (TMA). A thread has the
//            same two filters of all pixels, so that statistics take few registers.
// Shared     the windows of a band (1,024 bytes for each vector), and two vectors of zeros, which pad K; two bands of the
//            image; 8,192 bytes of results.
// Registers  120, so that three blocks fit a multiprocessor: some copy windows while others multiply.
// Limit      bytes; ResNet's stem on an H100 reaches 0.77 of the copy bandwidth, 0.56 with statistics (decision 071).
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w holds, j = 0 .. 7:
//
//   A (filters)          k = 2t, 2t+1   2t+8, 2t+9          D                      pixels   8j + 2t   8j + 2t + 1
//     filter 16w + g        a[0]          a[2]                filter 16w + g               d[j][0]    d[j][1]
//     filter 16w + g + 8    a[1]          a[3]                filter 16w + g + 8           d[j][2]    d[j][3]
#include "stem_im2col.cuh"
#include "thread_statistics.cuh"
#include "stem_im2col_arguments.h"

namespace mbc {

struct StemIm2colPipelines {
  Pipeline<IM2COL_IMAGES> images;
  Barrier warpgroup_barrier;  // of the warpgroup
};

// Two elements of a filter's weights from the k-th element of its windows on, zeros in the padding.
template <typename T>
__device__ inline uint32_t weight_word(const T* filter, const Im2col& f, int32_t k) {
  const int32_t row = k / (8 * f.vectors), at = k - row * 8 * f.vectors;
  if (row >= f.kernel_height) return 0;
  const T* pair = filter + row * f.run + at, zero = from_float<T>(0.0f);
  return word_of(at < f.run ? pair[0] : zero, at + 1 < f.run ? pair[1] : zero);
}

template <int STEPS, typename T>
__device__ inline void read_weights(uint32_t (&a)[STEPS][4], const T* weight, int32_t first, const Im2col& f) {
  const int32_t lane = threadIdx.x % 32, t = lane % 4;
  const T* const filter = weight + (first + static_cast<int32_t>(threadIdx.x) / 32 * 16 + lane / 4) * f.kernel_height * f.run;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int v = 0; v < 4; ++v)
      a[step][v] = weight_word(filter + v % 2 * 8 * f.kernel_height * f.run, f, step * 16 + v / 2 * 8 + 2 * t);
}

// Starts all wgmma of an output row. K reaches beyond the windows in at most the last PADDED_STEPS steps, which read
// `zeros`, whatever the weights are there.
template <int STEPS, typename T>
__device__ inline void issue_row(float (&sums)[8][4], const uint32_t (&a)[STEPS][4], const char* windows,
                                 const char* zeros, int32_t window_vectors) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const bool whole = step < STEPS - Im2col::PADDED_STEPS;
    const char* first = whole || 2 * step < window_vectors ? windows + 2 * step * IM2COL_VECTOR_BYTES : zeros;
    const bool half = !whole && 2 * step + 1 == window_vectors;
    const auto leading_bytes = static_cast<int32_t>(half ? zeros - first : IM2COL_VECTOR_BYTES);
    wgmma_rs<false, T>(sums, a[step], CoreMatrices{first, 8 * 16, leading_bytes}, step > 0);
  }
  wgmma_commit();
}

// Transposes the results of an output row: rows of 64 filters, with the swizzle of 128 bytes.
template <typename T>
__device__ inline void write_results(const uint32_t (&words)[8][2], char* results) {
  // One stmatrix stores four matrices of 8 x 8 results: the pixel whose address this thread supplies, and its filters.
  const int32_t lane = threadIdx.x % 32, pixel = lane / 16 * 8 + lane % 8, eight = threadIdx.x / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    stmatrix_x4_trans(results + swizzled_offset(8 * j + pixel, eight), words[j][0], words[j][1], words[j + 1][0], words[j + 1][1]);
}

template <int STEPS, typename T, bool STATISTICS>
__device__ inline void compute_tiles(const T* __restrict__ weight, const TensorMap& features, const char* images,
                                     char* windows, char* results, StemIm2colPipelines& pipelines,
                                     typename Statistics<T>::State* partial, const Im2col& f) {
  const int32_t first = blockIdx.y * IM2COL_FILTERS, lane = threadIdx.x % 32, t = lane % 4;
  char* const zeros = windows + f.windows_bytes();
  WarpgroupSync sync{pipelines.warpgroup_barrier};
  uint32_t a[STEPS][4];
  read_weights(a, weight, first, f);
  reinterpret_cast<uint4*>(zeros)[threadIdx.x] = {0, 0, 0, 0};
  static_assert(IM2COL_PADDING_BYTES == WARPGROUP * sizeof(uint4));
  ThreadStatistics<T, 2> statistics;
  int32_t iteration = 0;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x, ++iteration) {
    const StemTile tile = f.tile(number);
    pipelines.images.consumer_wait(iteration);
    lay_out_windows<true>(images + iteration % IM2COL_IMAGES * f.image_bytes, windows, f);
    pipelines.images.consumer_release(iteration);
    fence_proxy_async();
    sync();  // all windows are complete
    for (int32_t row = 0; row < tile.rows; ++row) {
      float sums[8][4];
      issue_row<STEPS, T>(sums, a, windows + f.row_begin(row), zeros, f.window_vectors());
      wgmma_wait(sums);
      uint32_t words[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) words[j][h] = rounded_word<T>(sums[j] + 2 * h);
      if (threadIdx.x == 0) tma_store_wait_read();
      sync();  // the results of the row before this one have been read
      write_results<T>(words, results);
      fence_proxy_async();
      sync();
      if (threadIdx.x == 0) tma_store(features, {first, tile.x0, f.features_row(tile, row)}, results);
      if constexpr (STATISTICS) {
        const auto element = [&](int pixel) {
          return [&words, pixel](int h) { return to_float(element_of<T>(words[pixel / 2][h], pixel % 2)); };
        };
        if (statistics.count == 0 && 2 * t < tile.columns) statistics.begin(element(0));
        if (tile.columns == STEM_COLUMNS) {  // the usual case, without branches
#pragma unroll
          for (int pixel = 0; pixel < 16; ++pixel) statistics.push(element(pixel));
        } else {
#pragma unroll
          for (int pixel = 0; pixel < 16; ++pixel)
            if (pixel / 2 * 8 + 2 * t + pixel % 2 < tile.columns) statistics.push(element(pixel));
        }
      }
    }
  }
  if (threadIdx.x == 0) tma_store_wait_read();
  if constexpr (STATISTICS) {
    const int32_t warp = threadIdx.x / 32, filter = first + warp * 16 + lane / 4;
    const int64_t part = blockIdx.x;
    statistics.template store<1, 2>([&](int h) { return partial + part * f.filters + filter + 8 * h; });
  }
}

// `partial`: the statistics' states of blocks, with STATISTICS.
template <int STEPS, typename T, bool STATISTICS>
__global__ void __launch_bounds__(IM2COL_THREADS, IM2COL_BLOCKS)
    stem_im2col(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap features,
                const T* __restrict__ weight, typename Statistics<T>::State* partial, const __grid_constant__ Im2col f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ StemIm2colPipelines pipelines;
  char* const results = aligned_shared(shared);
  char* const images = results + STEM_COLUMNS * SWIZZLE_ROW;
  if (threadIdx.x == 0) {
    pipelines.warpgroup_barrier.start(WARPGROUP / 32);
    pipelines.images.start(1, 1);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    compute_tiles<STEPS, T, STATISTICS>(weight, features, images, images + IM2COL_IMAGES * f.image_bytes, results, pipelines,
                                        partial, f);
  } else if (threadIdx.x == WARPGROUP) {
    int32_t iteration = 0;
    for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x, ++iteration) {
      pipelines.images.producer_acquire(iteration);
      f.copy_band(images + iteration % IM2COL_IMAGES * f.image_bytes, image, f.tile(number),
                  pipelines.images.full[iteration % IM2COL_IMAGES]);
    }
  }
}

// `blocks` for each 64 filters; 0: as many as the GPU can hold.
template <typename T, bool STATISTICS>
const char* run_stem_im2col(const MbcCall& call, int64_t blocks, typename Statistics<T>::State* partial) {
  const auto& a = arguments<StemConvArguments>(call);
  const Im2col f(a);
  TensorMap image, features;
  if (const char* problem = f.set_image(image, in<T>(call, 0), a.rows)) return problem;
  if (const char* problem = f.set_features(features, out<T>(call, 2), a.rows)) return problem;
  if (blocks == 0) blocks = min(f.tiles, multiprocessors() * IM2COL_BLOCKS);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(f.filters / IM2COL_FILTERS));
  const int shared = STEM_COLUMNS * SWIZZLE_ROW + IM2COL_IMAGES * f.image_bytes + f.windows_bytes() + IM2COL_PADDING_BYTES +
                     IM2COL_ALIGNED_BYTES;
  const auto launch = [&](auto kernel) {
    MBC_LAUNCH_SHARED(kernel, grid, IM2COL_THREADS, shared, call.stream, image, features, in<T>(call, 1), partial, f);
  };
  constexpr int PADDED = Im2col::PADDED_STEPS;
  const int32_t steps = (f.window_vectors() + 1) / 2;
  if (steps <= PADDED)
    launch(stem_im2col<PADDED, T, STATISTICS>);
  else if (steps <= 2 * PADDED)
    launch(stem_im2col<2 * PADDED, T, STATISTICS>);
  else if (steps <= 3 * PADDED)
    launch(stem_im2col<3 * PADDED, T, STATISTICS>);
  else
    return "a window has more than 24 times 8 elements";
  return nullptr;
}

}  // namespace mbc

extern "C" const char* mbc_stem_im2col(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<StemConvArguments>(call, [&](auto of) {
    return run_stem_im2col<decltype(of), false>(call, 0, nullptr);
  });
}
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_stem_im2col_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<StemConvStatisticsArguments>(call, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<StemConvStatisticsArguments>(call);
    auto* partial = out<typename Statistics<T>::State>(call, 5);
    if (const char* problem = run_stem_im2col<T, true>(call, a.blocks, partial)) return problem;
    merge_all_parts(call.stream, a.blocks, a.filters, partial,
                    EpilogueStatistics<T>{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}});
    return nullptr;
  });
}
