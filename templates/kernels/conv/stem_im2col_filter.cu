// Filter gradient of stem convolutions (a network's first, with at most seven channels) in bf16 and fp16, channels
// last, on Hopper's tensor cores. Filters are a multiple of 64. The first convolution of a network needs no data
// gradient.
//
// GEMM       M = filters, N = elements of a window, 64, 128 or 192 with padding (stem_im2col.cuh), K = output pixels, split
//            over `parts` blocks (split-K) that `add_parts` adds in order.
// Tile       64 filters x all elements of a window; K = 16 pixels in each step.
// Warps      5. A warpgroup copies the windows of a band to shared memory, then issues wgmma m64nNk16, gradients (A) in
//            registers through ldmatrix.trans, windows (B) in shared memory. A thread of the last warp copies (TMA)
//            gradients of output rows, and bands of the image, one ahead.
// Shared     gradients of 3 output rows of 64 pixels, 8,192 bytes each; the windows of a band (1,024 bytes for each
//            vector, also behind the last row, which is read as far as N reaches); two bands of the image.
// Registers  138; two blocks fit a multiprocessor: one copies windows while the other multiplies.
// Limit      bytes; ResNet's stem on an H100 reaches 0.92 of the copy bandwidth (decision 071).
//
// Windows beyond the last column of a row are multiplied by gradients of zero. An infinite element of the image there,
// which no filter reaches, gives NaN.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w holds:
//
//   A (filters)          k = 2t, 2t+1   2t+8, 2t+9          D                 window elements   8j + 2t    8j + 2t + 1
//     filter 16w + g        a[0]          a[2]                filter 16w + g                    d[j][0]    d[j][1]
//     filter 16w + g + 8    a[1]          a[3]                filter 16w + g + 8                d[j][2]    d[j][3]
#include "stem_conv_filter.cuh"
#include "stem_im2col.cuh"

namespace mbc {

constexpr int IM2COL_GRADIENT_BYTES = STEM_COLUMNS * SWIZZLE_ROW;  // bytes of an output row

struct Im2colFilterPipelines {
  Pipeline<IM2COL_IMAGES> images;
  Pipeline<STEM_STAGES> gradients;
  Barrier warpgroup_barrier;  // of the warpgroup
};

// Run by one thread: copies bands of the image, and the rows of gradients that belong to them.
__device__ inline void copy_tiles(const TensorMap& image, const TensorMap& features, char* gradients, char* images,
                                  Im2colFilterPipelines& pipelines, const Im2col& f) {
  const int32_t first = blockIdx.y * IM2COL_FILTERS;
  int32_t iteration = 0, copied = 0;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x, ++iteration) {
    const StemTile tile = f.tile(number);
    pipelines.images.producer_acquire(iteration);
    f.copy_band(images + iteration % IM2COL_IMAGES * f.image_bytes, image, tile,
                pipelines.images.full[iteration % IM2COL_IMAGES]);
    for (int32_t row = 0; row < tile.rows; ++row, ++copied) {
      Barrier& full = pipelines.gradients.full[copied % STEM_STAGES];
      pipelines.gradients.producer_acquire(copied);
      full.arrive_expect_tx(IM2COL_GRADIENT_BYTES);
      tma_load(gradients + copied % STEM_STAGES * IM2COL_GRADIENT_BYTES, features,
               {first, tile.x0, f.features_row(tile, row)}, full);
    }
  }
}

template <typename T, int TILES>
__device__ inline void accumulate_tiles(float (&sums)[TILES][4], const char* gradients, const char* images, char* windows,
                                 Im2colFilterPipelines& pipelines, const Im2col& f) {
  constexpr int PIECES = STEM_COLUMNS / 16;  // pieces of a row: K = 16 pixels each
  // One ldmatrix reads four matrices of 8 pixels x 8 filters: the row whose address this thread supplies, and its
  // filters.
  const int32_t lane = threadIdx.x % 32, pixel = lane / 16 * 8 + lane % 8, eight = threadIdx.x / 32 * 2 + lane / 8 % 2;
  WarpgroupSync sync{pipelines.warpgroup_barrier};
  int32_t iteration = 0, read = 0;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x, ++iteration) {
    const StemTile tile = f.tile(number);
    pipelines.images.consumer_wait(iteration);
    sync();  // the windows of the tile before this one have been read
    lay_out_windows<false>(images + iteration % IM2COL_IMAGES * f.image_bytes, windows, f);
    pipelines.images.consumer_release(iteration);
    fence_proxy_async();
    sync();
    for (int32_t row = 0; row < tile.rows; ++row, ++read) {
      const char* stage = gradients + read % STEM_STAGES * IM2COL_GRADIENT_BYTES;
      uint32_t a[PIECES][4];
      pipelines.gradients.consumer_wait(read);
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        ldmatrix_x4_trans(a[i], reinterpret_cast<const uint4*>(stage + swizzled_offset(i * 16 + pixel, eight)));
      pipelines.gradients.consumer_release(read);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const CoreMatrices of{windows, IM2COL_VECTOR_BYTES, 8 * 16, f.row_begin(row) + i * 16 * 16};
        wgmma_rs<true, T>(sums, a[i], of, true);
      }
      wgmma_commit();
      wgmma_wait(sums);
    }
  }
}

template <typename T, int TILES>
__global__ void __launch_bounds__(IM2COL_THREADS, 2)
    stem_im2col_filter(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap features,
                       float* __restrict__ partial, const __grid_constant__ Im2col f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Im2colFilterPipelines pipelines;
  char* const gradients = aligned_shared(shared);
  char* const images = gradients + STEM_STAGES * IM2COL_GRADIENT_BYTES;
  char* const windows = images + IM2COL_IMAGES * f.image_bytes;
  if (threadIdx.x == 0) {
    pipelines.warpgroup_barrier.start(WARPGROUP / 32);
    pipelines.images.start(1, 1);
    pipelines.gradients.start(1, 1);
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    float sums[TILES][4] = {};
    accumulate_tiles<T>(sums, gradients, images, windows, pipelines, f);
    const int32_t lane = threadIdx.x % 32, filter = blockIdx.y * IM2COL_FILTERS + threadIdx.x / 32 * 16 + lane / 4;
    float* part = partial + static_cast<int64_t>(blockIdx.x) * f.window_vectors() * 8 * f.filters + filter;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      if (j < f.window_vectors()) {
#pragma unroll
        for (int v = 0; v < 4; ++v) part[(8 * j + lane % 4 * 2 + v % 2) * f.filters + v / 2 * 8] = sums[j][v];
      }
  } else if (threadIdx.x == WARPGROUP) {
    copy_tiles(image, features, gradients, images, pipelines, f);
  }
}

}  // namespace mbc

extern "C" const char* mbc_stem_im2col_backward_filter(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<StemConvArguments>(call, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<StemConvArguments>(call);
    const Im2col f(a);
    TensorMap image, features;
    if (const char* problem = f.set_image(image, in<T>(call, 0), a.rows)) return problem;
    if (const char* problem = f.set_features(features, in<T>(call, 1), a.rows)) return problem;
    float* partial = out<float>(call, 3);
    const dim3 grid(static_cast<unsigned>(a.parts), static_cast<unsigned>(f.filters / IM2COL_FILTERS));
    const int32_t vectors = f.window_vectors();
    const auto launch = [&](auto kernel, int32_t tiles) {
      const int shared = STEM_STAGES * IM2COL_GRADIENT_BYTES + IM2COL_IMAGES * f.image_bytes + f.windows_bytes() +
                         (tiles - vectors) * IM2COL_VECTOR_BYTES + IM2COL_ALIGNED_BYTES;
      MBC_LAUNCH_SHARED(kernel, grid, IM2COL_THREADS, shared, call.stream, image, features, partial, f);
    };
    if (vectors <= 8)
      launch(stem_im2col_filter<T, 8>, 8);
    else if (vectors <= 16)
      launch(stem_im2col_filter<T, 16>, 16);
    else if (vectors <= 24)
      launch(stem_im2col_filter<T, 24>, 24);
    else
      return "a window has more than 24 times 8 elements";
    FilterParts(f, vectors * 8, f.vectors * 8).add(call, partial, a.parts, a.accumulate != 0);
    return nullptr;
  });
}
