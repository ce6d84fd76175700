// Gradient of convolution filters in emulated fp32 (3xFP16, see fp32_emulated.cuh). Channels last; channels and filters
// are multiples of 64.
//
// GEMM       M = filters, N = filter taps * channels, K = output pixels, split over `parts` blocks (split-K) that
//            `add_parts` adds in order, in fp64.
// Tile       128 filters x 128 columns; WIDE: 64 filters x 256 columns. Columns are in blocks of 64 channels, which may
//            belong to different taps; a stage is K = 64 pixels.
// Launches   `find_largest` (scale), `split_tensor` (the image, once for all filter taps), the GEMM, `add_parts`.
// Warps      384 threads. Warpgroup 0 is the producer: unsplit gradients and the split image, both with cp.async.
//            Warpgroups 1 and 2 are consumers: each splits its gradients in registers (A) and starts wgmma m64n128k16
//            with the image in shared memory (B, rows are K). They have different filters or, WIDE, different columns.
// Shared     3 stages of 66,560 bytes; WIDE: 2 of 82,944.
// Registers  80 for a producer thread, 208 for a consumer thread (setmaxnreg).
// Limit      splitting in the consumer warps, as in fp32_emulated_conv.cu.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of its 64 filters x 128 columns:
//
//                columns   8j + 2t   8j + 2t + 1      j = 0 .. 15
//   filter 16w + g         d[j][0]     d[j][1]
//   filter 16w + g + 8     d[j][2]     d[j][3]
#include "fp32_emulated.cuh"
#include "split_k.cuh"

namespace mbc {

// Equal to the constant LARGEST_BYTES in mbc/kernels/cuda/fp32_emulated/fp32_emulated_conv.py.
constexpr int LARGEST_BLOCKS = 512, LARGEST_THREADS = 256;

// The largest magnitude in each block's share.
__global__ void find_largest(const float* __restrict__ x, float* magnitudes, int64_t count) {
  __shared__ float of_warps[LARGEST_THREADS / 32];
  float largest = 0.0f;
  const int64_t step = static_cast<int64_t>(gridDim.x) * LARGEST_THREADS;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * LARGEST_THREADS + threadIdx.x; i < count / 4; i += step) {
    const Vec<float, 4> words = load<4>(x + 4 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = larger_finite(largest, words.v[e]);
  }
  largest = largest_of_block(largest, of_warps, LARGEST_THREADS);
  if (threadIdx.x == 0) magnitudes[blockIdx.x] = largest;
}

__device__ inline float largest_of(const float* magnitudes, float* of_warps) {
  float largest = 0.0f;
  for (int i = threadIdx.x; i < LARGEST_BLOCKS; i += blockDim.x) largest = max(largest, magnitudes[i]);
  return largest_of_block(largest, of_warps, blockDim.x);
}

// For each 64 channels of a pixel, the high fp16 words come first, then the low ones.
__global__ void split_tensor(
    const float* __restrict__ x, const float* __restrict__ magnitudes, uint4* split, int64_t count) {
  __shared__ float of_warps[LARGEST_THREADS / 32];
  const float up = SplitScale(largest_of(magnitudes, of_warps)).up;
  const int64_t step = static_cast<int64_t>(gridDim.x) * LARGEST_THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * LARGEST_THREADS + threadIdx.x; i < count / 8; i += step) {
    const Vec<float, 4> words[2] = {load<4>(x + 8 * i), load<4>(x + 8 * i + 4)};
    uint32_t high[4], low[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float* two = words[pair / 2].v + pair % 2 * 2;
      const SplitPair both = split_pair(two[0] * up, two[1] * up);
      high[pair] = both.high;
      low[pair] = both.low;
    }
    uint4* to = split + i / 8 * 16 + i % 8;
    to[0] = {high[0], high[1], high[2], high[3]};
    to[8] = {low[0], low[1], low[2], low[3]};
  }
}

// Consumers have different filters of the same columns, or (WIDE) the same filters and different columns.
template <bool WIDE>
struct FilterStage {
  static constexpr int FILTERS = WIDE ? 64 : 128, BLOCKS = WIDE ? 4 : 2;  // filters of a block; blocks of 64 columns
  static constexpr int PITCH = FILTERS + 4;  // words of a pixel, without bank conflicts
  static constexpr int HALF = BLOCKS * SWIZZLE_BLOCK;  // bytes of either half of the image
  static constexpr int GRADIENTS = 2 * HALF;           // offset of the gradients
  static constexpr int BYTES = GRADIENTS + EMULATED_K * PITCH * 4;
  static constexpr int COUNT = WIDE ? 2 : 3;
};

struct EmulatedFilter : ConvolutionShape, PixelGrid {
  int32_t pixels, stages, columns, across;  // pixels of the output; stages in all; blocks of 64 columns; tiles of them
  GridPixel stage;                         // distance from one stage to the next

  EmulatedFilter(const Fp32EmulatedArguments& a, int blocks)
      : ConvolutionShape(a), PixelGrid{out_height, out_width},
        pixels(static_cast<int32_t>(a.rows * a.out_height * a.out_width)),
        stages(static_cast<int32_t>(divide_up(pixels, EMULATED_K))),
        columns(kernel_height * kernel_width * channels / 64),
        across(static_cast<int32_t>(divide_up(columns, blocks))), stage(locate(EMULATED_K)) {}
  // The first stage of a part.
  __device__ int32_t begin(int32_t part) const {
    return static_cast<int32_t>(static_cast<int64_t>(stages) * part / gridDim.y);
  }
};

template <bool WIDE>
__device__ inline void produce_filter_stages(
    const char* __restrict__ split, const float* __restrict__ dy, char* stages,
    Pipeline<FilterStage<WIDE>::COUNT>& pipeline, const EmulatedFilter& f) {
  using Stage = FilterStage<WIDE>;
  constexpr int PIXEL_STRIDE = WARPGROUP / 8, MINE = EMULATED_K / PIXEL_STRIDE;  // between pixels of a thread
  constexpr int SIXTEENS = Stage::FILTERS / 4, DY_STRIDE = WARPGROUP / SIXTEENS;
  const int32_t sixteen = threadIdx.x % 8, mine = threadIdx.x / 8, dy_mine = threadIdx.x / SIXTEENS;
  // Row and column of the filter tap of each block of columns, and its offset from a pixel.
  int32_t down[Stage::BLOCKS], right[Stage::BLOCKS], offset[Stage::BLOCKS];
#pragma unroll
  for (int b = 0; b < Stage::BLOCKS; ++b) {
    const int32_t column = static_cast<int32_t>(blockIdx.x) % f.across * Stage::BLOCKS + b;
    const int32_t tap = column / (f.channels / 64);
    // Beyond the last column, every pixel is outside the image.
    down[b] = column < f.columns ? tap / f.kernel_width : f.height + f.pad_top;
    right[b] = tap % f.kernel_width;
    offset[b] = (down[b] * f.width + right[b]) * f.channels + (column - tap * (f.channels / 64)) * 64;
  }
  const int32_t begin = f.begin(blockIdx.y), iterations = f.begin(blockIdx.y + 1) - begin;
  GridPixel at[MINE];
#pragma unroll
  for (int i = 0; i < MINE; ++i) at[i] = f.locate(begin * EMULATED_K + mine + i * PIXEL_STRIDE);
  int32_t left_over = f.pixels - begin * EMULATED_K;  // pixels from the stage on
  const char* of_thread = split + sixteen * 16;
  const float* gradients = dy + (static_cast<int64_t>(begin) * EMULATED_K + dy_mine) * f.filters +
                           static_cast<int32_t>(blockIdx.x) / f.across * Stage::FILTERS + threadIdx.x % SIXTEENS * 4;
  for (int32_t iteration = 0; iteration < iterations; ++iteration) {
    char* stage = stages + iteration % Stage::COUNT * Stage::BYTES;
    pipeline.producer_acquire(iteration);
    char* to = stage + Stage::GRADIENTS + (dy_mine * Stage::PITCH + threadIdx.x % SIXTEENS * 4) * 4;
#pragma unroll
    for (int i = 0; i < EMULATED_K; i += DY_STRIDE) {
      const bool there = i + dy_mine < left_over;
      cp_async_16(reinterpret_cast<uint4*>(to + i * Stage::PITCH * 4), there ? gradients : dy, there);
      gradients += DY_STRIDE * f.filters;
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int32_t pixel = mine + i * PIXEL_STRIDE;
      const int32_t y = at[i].line * f.stride_height - f.pad_top, left = at[i].column * f.stride_width - f.pad_left;
      const int32_t corner = ((at[i].image * f.height + y) * f.width + left) * f.channels;
      const uint32_t height = pixel < left_over ? f.height : 0;
#pragma unroll
      for (int b = 0; b < Stage::BLOCKS; ++b) {
        const bool there = static_cast<uint32_t>(y + down[b]) < height &&
                           static_cast<uint32_t>(left + right[b]) < static_cast<uint32_t>(f.width);
        const char* from = of_thread + (there ? static_cast<int64_t>(corner + offset[b]) * 4 : 0);
        uint4* block = reinterpret_cast<uint4*>(stage + b * SWIZZLE_BLOCK + swizzled_offset(pixel, sixteen));
        cp_async_16(block, from, there);
        cp_async_16(block + Stage::HALF / 16, from + 128, there);
      }
      f.advance(at[i], f.stage);
    }
    pipeline.full[iteration % Stage::COUNT].cp_async_arrive();
    left_over -= EMULATED_K;
  }
}

template <bool WIDE>
__device__ inline void consume_filter_stages(
    const char* stages, float down, float* __restrict__ partial, Pipeline<FilterStage<WIDE>::COUNT>& pipeline,
    const EmulatedFilter& f) {
  using Stage = FilterStage<WIDE>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = threadIdx.x / WARPGROUP - 1;
  const int32_t first = (WIDE ? 0 : group * 64) + threadIdx.x % WARPGROUP / 32 * 16 + g;  // filter
  const int32_t block = WIDE ? group * 2 : 0;                                             // of 64 columns
  const int32_t iterations = f.begin(blockIdx.y + 1) - f.begin(blockIdx.y);
  const auto stage = [&](int32_t iteration) { return stages + iteration % Stage::COUNT * Stage::BYTES; };
  const auto fetch = [&](int32_t iteration, int step, int h) {
    const float* pixels = reinterpret_cast<const float*>(stage(iteration) + Stage::GRADIENTS);
    const float* gradients = pixels + first + 2 * t * Stage::PITCH;
    Vec<float, 4> words;
#pragma unroll
    for (int e = 0; e < 4; ++e) words.v[e] = gradients[(step * 16 + e / 2 * 8 + e % 2) * Stage::PITCH + 8 * h];
    return words;
  };
  float sums[16][4] = {};
  consume_stages_3xfp16<true>(
      sums, iterations, pipeline, fetch,
      [&](int32_t iteration) { return stage(iteration) + block * SWIZZLE_BLOCK; }, Stage::HALF,
      [](int32_t) { return 1.0f; }, [](int32_t) {});
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t filter = static_cast<int64_t>(blockIdx.x) / f.across * Stage::FILTERS + first + 8 * h;
    float* to = partial + (blockIdx.y * static_cast<int64_t>(f.filters) + filter) * f.columns * 64;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int32_t column = static_cast<int32_t>(blockIdx.x) % f.across * Stage::BLOCKS + block + j / 8;
      if (column < f.columns)
        store(to + column * 64 + j % 8 * 8 + 2 * t, Vec<float, 2>{{sums[j][2 * h] * down, sums[j][2 * h + 1] * down}});
    }
  }
}

template <bool WIDE>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    fp32_emulated_filter(const char* __restrict__ split, const float* __restrict__ dy, const float* __restrict__ magnitudes,
                     float* __restrict__ partial, EmulatedFilter f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<FilterStage<WIDE>::COUNT> pipeline;
  char* stages = aligned_shared(shared);
  __shared__ float of_warps[PIPELINE_THREADS / 32];
  if (threadIdx.x == 0) pipeline.start(WARPGROUP);
  const float down = SplitScale(largest_of(magnitudes, of_warps)).down;  // its barrier also follows the pipeline's set-up
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce_filter_stages<WIDE>(split, dy, stages, pipeline, f);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume_filter_stages<WIDE>(stages, down, partial, pipeline, f);
  }
}

template <bool WIDE>
void run_fp32_emulated_filter(const MbcCall& call, const Fp32EmulatedArguments& a) {
  using Stage = FilterStage<WIDE>;
  const EmulatedFilter f(a, Stage::BLOCKS);
  const auto *x = in<float>(call, 0), *dy = in<float>(call, 1);
  const int64_t count = a.rows * a.height * a.width * a.channels, elements = f.columns * int64_t{64} * f.filters;
  float* magnitudes = out<float>(call, 3);
  char* split = reinterpret_cast<char*>(magnitudes + LARGEST_BLOCKS);
  float* partial = reinterpret_cast<float*>(split + count * 4);
  MBC_LAUNCH(find_largest, LARGEST_BLOCKS, LARGEST_THREADS, call.stream, x, magnitudes, count);
  MBC_LAUNCH(split_tensor, blocks_for(count / 8), LARGEST_THREADS, call.stream, x, magnitudes,
             reinterpret_cast<uint4*>(split), count);
  const dim3 grid(static_cast<unsigned>(f.filters / Stage::FILTERS * f.across), static_cast<unsigned>(a.parts));
  constexpr int SHARED = Stage::COUNT * Stage::BYTES + 1008;
  MBC_LAUNCH_SHARED(fp32_emulated_filter<WIDE>, grid, PIPELINE_THREADS, SHARED, call.stream, split, dy, magnitudes, partial,
                    f);
  add_parts(call.stream, partial, out<float>(call, 2), elements, a.parts, a.accumulate != 0);
}

}  // namespace mbc

extern "C" const char* mbc_fp32_emulated_conv_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<Fp32EmulatedArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  if (a.filters % 128 == 0)
    run_fp32_emulated_filter<false>(call, a);
  else
    run_fp32_emulated_filter<true>(call, a);
  return launched();
}
