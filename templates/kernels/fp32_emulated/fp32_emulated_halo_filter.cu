// Gradient of filters that are three taps wide, at a stride of one, in emulated fp32 (3xFP16, see fp32_emulated.cuh).
// Every word is split once for all taps of a filter row. Channels last; channels and filters are multiples of 64.
//
// GEMM       for each of the three taps of a filter row: M = filters, N = 64 channels, K = output pixels, split over
//            `parts` blocks (split-K) that `add_parts` adds in order, in fp64.
// Tile       one row of the filter (three taps) of 128 filters x 64 channels, or of 64 filters. A stage is K = 64
//            pixels of the gradient and 66 of the image. Image rows follow one another at a pitch that includes
//            padding, which is right of one row and left of the next: the operand of the next tap is the same one, 16
//            bytes further on (core matrices without swizzle).
// Warps      512 threads. Warpgroups 0 and 1 read and split both operands. Warpgroups 2 and 3 are consumers: gradients
//            come through ldmatrix.trans into registers (A), wgmma m64n64k16 reads the image from shared memory (B,
//            rows are K). Each has 64 of the 128 filters; with 64 filters each takes every second stage.
// Scale      a power of two for eight channels of the image or the gradients (`find_largest_of_chunks`).
// Shared     4 stages of 51,456 bytes, or 6 of 34,304 for 64 filters.
// Registers  48 for a splitting thread, 208 for a consumer thread (setmaxnreg).
// Limit      the splitting warps, which are always busy (decision 032).
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, for each tap, of 64 filters x 64 channels:
//
//           columns   8j + 2t   8j + 2t + 1      j = 0 .. 7; rows and columns are those of the stage, which
//   16w + g           d[j][0]     d[j][1]        `channel_of` maps to filters and channels
//   16w + g + 8       d[j][2]     d[j][3]
#include "fp32_emulated_halo.cuh"
#include "split_k.cuh"

namespace mbc {

constexpr int HALO_WIDTH = 3;                              // width of the filter
constexpr int HALO_STAGE_PIXELS = EMULATED_K + HALO_WIDTH - 1;  // pixels of the image in a stage
// Bytes of eight channels, an odd multiple of 16 to avoid bank conflicts; of 64 channels, high or low; and of both.
constexpr int HALO_CHUNK = (HALO_STAGE_PIXELS | 1) * 16, HALO_HALF = 8 * HALO_CHUNK, HALO_BLOCK = 2 * HALO_HALF;
// 64 K registers in all; each thread starts with 128.
constexpr int SPLITTER_REGISTERS = 48, SUMMING_CONSUMER_REGISTERS = 208;
constexpr int HALO_STRIDE = SPLITTERS / 8;  // pixels between two pixels of a thread
// Blocks of `find_largest_of_chunks` for each 64 channels, as in
// mbc/kernels/cuda/fp32_emulated/fp32_emulated_halo_filter.py.
constexpr int FOUND_BLOCKS = 256;

// The channel, of 64, of an element of a chunk: eight channels that a thread splits together and that share a scale.
// The first four and the last four are 32 apart, so that eight threads read 128 bytes together.
__device__ inline int32_t channel_of(int32_t chunk, int32_t element) {
  return element / 4 * 32 + chunk * 4 + element % 4;
}

// Finds the largest magnitude of each chunk of the image and of the gradients in a block's pixels: [64 channels, chunk,
// block].
__global__ void find_largest_of_chunks(
    const float* __restrict__ x, const float* __restrict__ dy, float* magnitudes, int32_t channels, int32_t filters,
    int32_t image_pixels, int32_t pixels) {
  constexpr int AT_ONCE = THREADS / 16;
  __shared__ float of_warps[THREADS / 32][8];
  const int32_t blocks = channels / 64, block = blockIdx.y, across = block < blocks ? channels : filters;
  const int32_t count = block < blocks ? image_pixels : pixels;
  const float* from = (block < blocks ? x + block * 64 : dy + (block - blocks) * 64) + threadIdx.x % 16 * 4;
  float largest = 0.0f;
#pragma unroll 8
  for (int32_t pixel = blockIdx.x * AT_ONCE + threadIdx.x / 16; pixel < count; pixel += FOUND_BLOCKS * AT_ONCE) {
    const Vec<float, 4> words = load<4>(from + static_cast<int64_t>(pixel) * across);
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = larger_finite(largest, words.v[e]);
  }
#pragma unroll
  for (int mask = 8; mask < 32; mask *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  if (threadIdx.x % 32 < 8) of_warps[threadIdx.x / 32][threadIdx.x % 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 8) return;
  for (int warp = 0; warp < THREADS / 32; ++warp) largest = max(largest, of_warps[warp][threadIdx.x]);
  magnitudes[(block * 8 + threadIdx.x) * FOUND_BLOCKS + blockIdx.x] = largest;
}

template <int FILTER_BLOCKS>  // blocks of 64 filters
struct HaloFilterStage {
  static constexpr int BLOCKS = 1 + FILTER_BLOCKS;  // blocks of 64 channels: the image's, then those of gradients
  static constexpr int BYTES = BLOCKS * HALO_BLOCK, COUNT = 12 / BLOCKS;
  static constexpr int SHARING = FILTER_BLOCKS;  // consumers that share a stage
};

inline int32_t larger(int32_t a, int32_t b) { return a < b ? b : a; }

struct HaloFilter : ConvolutionShape, PixelGrid {
  int32_t images, stages, blocks, across;  // blocks of 64 channels; tiles of columns
  GridPixel step;                         // from a pixel of a thread to the next

  explicit HaloFilter(const Fp32EmulatedArguments& a)
      : ConvolutionShape(a),
        // The padding right of a row is also the padding left of the next row.
        PixelGrid{out_height, larger(out_width, width + larger(pad_left, out_width + HALO_WIDTH - 1 - width - pad_left))},
        images(static_cast<int32_t>(a.rows)),
        stages(static_cast<int32_t>(divide_up(a.rows * a.out_height * pitch, EMULATED_K))), blocks(channels / 64),
        across(kernel_height * blocks), step(locate(HALO_STRIDE)) {}
  // The first stage of a part.
  __device__ int32_t begin(int32_t part) const {
    return static_cast<int32_t>(static_cast<int64_t>(stages) * part / gridDim.y);
  }
};

struct EightWords {
  Vec<float, 4> four[2];

  __device__ void load(const float* from, bool there) {
#pragma unroll
    for (int i = 0; i < 2; ++i) four[i] = there ? mbc::load<4>(from + 32 * i) : Vec<float, 4>{};
  }
  // Writes to `to` and, if that is `needed`, to a second address.
  __device__ void split(float up, char* to, char* second = nullptr, bool needed = false) const {
    uint4 both[2];
    split_eight(four, up, both[0], both[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<uint4*>(to + h * HALO_HALF) = both[h];
      if (needed) *reinterpret_cast<uint4*>(second + h * HALO_HALF) = both[h];
    }
  }
};

// The first image pixels of a stage are also the last pixels of the stage before, which is complete once they are
// written.
template <int FILTER_BLOCKS>
__device__ inline void split_stages(
    const float* __restrict__ x, const float* __restrict__ dy, const float* up, char* stages,
    Pipeline<HaloFilterStage<FILTER_BLOCKS>::COUNT>& pipeline, const HaloFilter& f) {
  using Stage = HaloFilterStage<FILTER_BLOCKS>;
  const int32_t chunk = threadIdx.x % 8, mine = threadIdx.x / 8;
  const int32_t tile = static_cast<int32_t>(blockIdx.x), line = tile % f.across / f.blocks;
  const float* image = x + tile % f.across % f.blocks * 64;
  const float* gradients = dy + tile / f.across * FILTER_BLOCKS * 64;
  const int32_t begin = f.begin(blockIdx.y), iterations = f.begin(blockIdx.y + 1) - begin;
  GridPixel at = f.locate(begin * EMULATED_K + mine);
  EightWords words[Stage::BLOCKS];
  const auto fetch = [&] {
    const int32_t y = at.line + line - f.pad_top, left = at.column - f.pad_left, channel = channel_of(chunk, 0);
    const bool inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(f.height) &&
                        static_cast<uint32_t>(left) < static_cast<uint32_t>(f.width);
    words[0].load(image + (((at.image * f.height + y) * f.width + left) * f.channels + channel),
                  inside && at.image < f.images);
    const bool there = at.column < f.out_width && at.image < f.images;
    const float* pixel =
        gradients + (((at.image * f.out_height + at.line) * f.out_width + at.column) * f.filters + channel);
#pragma unroll
    for (int b = 1; b < Stage::BLOCKS; ++b) words[b].load(pixel + (b - 1) * 64, there);
    f.advance(at, f.step);
  };
  const auto end_stage = [&](int32_t iteration) {
    fence_proxy_async();
    pipeline.full[iteration % Stage::COUNT].arrive();
  };
  char* const of_thread = stages + chunk * HALO_CHUNK + mine * 16;
  const auto stage = [&](int32_t iteration) { return of_thread + iteration % Stage::COUNT * Stage::BYTES; };
  // The address of a thread's first pixel in the stage before `iteration`, if the pixel belongs to that stage, too.
  const auto before = [&](int32_t iteration) { return stage(iteration - 1) + EMULATED_K * 16; };
  const auto is_before = [&](int32_t iteration) { return mine < HALO_WIDTH - 1 && iteration > 0; };
  fetch();
  for (int32_t iteration = 0; iteration < iterations; ++iteration) {
    pipeline.producer_acquire(iteration);
#pragma unroll 1  // saves registers
    for (int i = 0; i < EMULATED_K; i += HALO_STRIDE) {
      char* const to = stage(iteration) + i * 16;
      words[0].split(up[chunk], to, before(iteration), i == 0 && is_before(iteration));
#pragma unroll
      for (int b = 1; b < Stage::BLOCKS; ++b) words[b].split(up[b * 8 + chunk], to + b * HALO_BLOCK);
      if (i == 0 && iteration > 0) end_stage(iteration - 1);
      fetch();
      compiler_fence();
    }
  }
  if (iterations == 0) return;
  if (is_before(iterations)) words[0].split(up[chunk], before(iterations));
  end_stage(iterations - 1);
}

template <int FILTER_BLOCKS>
__device__ inline void consume_halos(
    const char* stages, const float* down, float* __restrict__ partial,
    Pipeline<HaloFilterStage<FILTER_BLOCKS>::COUNT>& pipeline, const HaloFilter& f) {
  using Stage = HaloFilterStage<FILTER_BLOCKS>;
  constexpr int STAGE_STRIDE = CONSUMERS / Stage::SHARING;  // between the stages of a warpgroup
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
  const int32_t group = static_cast<int32_t>(threadIdx.x - SPLITTERS) / WARPGROUP;
  const int32_t block = 1 + group % FILTER_BLOCKS, first = group / FILTER_BLOCKS;  // block of gradients; stage
  const int32_t iterations = f.begin(blockIdx.y + 1) - f.begin(blockIdx.y);
  // The row of ldmatrix: four matrices of eight pixels x 16 filters, then the next eight pixels.
  const int32_t row = block * HALO_BLOCK + (warp * 2 + lane / 8 % 2) * HALO_CHUNK + (lane / 16 * 8 + lane % 8) * 16;
  float sums[HALO_WIDTH][8][4] = {}, part[2][8][4];
  const auto add = [&](int tap) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[tap][j][v] += part[tap % 2][j][v];
  };
  for (int32_t iteration = first; iteration < iterations; iteration += STAGE_STRIDE) {
    const char* stage = stages + iteration % Stage::COUNT * Stage::BYTES;
    pipeline.consumer_wait(iteration);
    uint32_t high[EMULATED_K_STEPS][4], low[EMULATED_K_STEPS][4];
#pragma unroll
    for (int step = 0; step < EMULATED_K_STEPS; ++step) {
      const char* from = stage + row + step * 16 * 16;
      ldmatrix_x4_trans(high[step], reinterpret_cast<const uint4*>(from));
      ldmatrix_x4_trans(low[step], reinterpret_cast<const uint4*>(from + HALO_HALF));
    }
#pragma unroll
    for (int tap = 0; tap < HALO_WIDTH; ++tap) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < EMULATED_K_STEPS; ++step) {
        const CoreMatrices highs{stage, HALO_CHUNK, 8 * 16, (step * 16 + tap) * 16};
        const CoreMatrices lows{stage, HALO_CHUNK, 8 * 16, highs.begin + HALO_HALF};
        wgmma_rs<true, __half>(part[tap % 2], low[step], highs, step > 0);
        wgmma_rs<true, __half>(part[tap % 2], high[step], lows, true);
        wgmma_rs<true, __half>(part[tap % 2], high[step], highs, true);
      }
      wgmma_commit();
      if (tap == 0) continue;
      wgmma_wait<1>(part[(tap - 1) % 2]);
      add(tap - 1);
    }
    wgmma_wait(part[(HALO_WIDTH - 1) % 2]);
    pipeline.consumer_release(iteration);
    add(HALO_WIDTH - 1);
  }

  const int32_t tile = static_cast<int32_t>(blockIdx.x), column = tile % f.across, line = column / f.blocks;
  const int64_t number = static_cast<int64_t>(blockIdx.y) * STAGE_STRIDE + first;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t chunk = warp * 2 + h;
    const int32_t filter = (tile / f.across * FILTER_BLOCKS + block - 1) * 64 + channel_of(chunk, lane / 4);
    const float of_filter = down[block * 8 + chunk];
    float* to = partial + ((number * f.filters + filter) * f.kernel_height + line) * HALO_WIDTH * f.channels +
                (column - line * f.blocks) * 64;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int tap = 0; tap < HALO_WIDTH; ++tap) {
        const float* two = sums[tap][j] + 2 * h;
        store(to + tap * f.channels + channel_of(j, lane % 4 * 2),
              Vec<float, 2>{{two[0] * of_filter * down[j], two[1] * of_filter * down[j]}});
      }
    }
  }
}

template <int FILTER_BLOCKS>
__global__ void __launch_bounds__(HALO_THREADS, 1)
    fp32_emulated_halo_filter(const float* __restrict__ x, const float* __restrict__ dy, const float* __restrict__ magnitudes,
                      float* __restrict__ partial, HaloFilter f) {
  using Stage = HaloFilterStage<FILTER_BLOCKS>;
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<Stage::COUNT> pipeline;
  __shared__ float up[Stage::BLOCKS * 8], down[Stage::BLOCKS * 8];  // scales of chunks
  char* stages = reinterpret_cast<char*>(shared);
  if (threadIdx.x == 0) pipeline.start(SPLITTERS, Stage::SHARING);
  const int32_t tile = static_cast<int32_t>(blockIdx.x);
  for (int32_t chunk = threadIdx.x / 32; chunk < Stage::BLOCKS * 8; chunk += HALO_THREADS / 32) {
    const int32_t filters = f.blocks + tile / f.across * FILTER_BLOCKS;
    const int32_t block = chunk < 8 ? tile % f.across % f.blocks : filters + chunk / 8 - 1;
    float largest = 0.0f;
    for (int32_t i = threadIdx.x % 32; i < FOUND_BLOCKS; i += 32)
      largest = max(largest, magnitudes[(block * 8 + chunk % 8) * FOUND_BLOCKS + i]);
    const SplitScale scale(largest_of_warp(largest));
    if (threadIdx.x % 32 == 0) {
      up[chunk] = scale.up;
      down[chunk] = scale.down;
    }
  }
  __syncthreads();
  if (threadIdx.x < SPLITTERS) {
    setmaxnreg_dec<SPLITTER_REGISTERS>();
    split_stages<FILTER_BLOCKS>(x, dy, up, stages, pipeline, f);
  } else {
    setmaxnreg_inc<SUMMING_CONSUMER_REGISTERS>();
    consume_halos<FILTER_BLOCKS>(stages, down, partial, pipeline, f);
  }
}

template <int FILTER_BLOCKS>
void run_fp32_emulated_halo_filter(const MbcCall& call, const Fp32EmulatedArguments& a) {
  using Stage = HaloFilterStage<FILTER_BLOCKS>;
  const HaloFilter f(a);
  const auto *x = in<float>(call, 0), *dy = in<float>(call, 1);
  const int64_t elements = static_cast<int64_t>(f.across) * HALO_WIDTH * 64 * f.filters;
  float* magnitudes = out<float>(call, 3);
  const unsigned blocks = static_cast<unsigned>(f.blocks + f.filters / 64);
  float* partial = magnitudes + blocks * 8 * FOUND_BLOCKS;
  const auto pixels = static_cast<int32_t>(a.rows * a.out_height * a.out_width);
  MBC_LAUNCH(find_largest_of_chunks, dim3(FOUND_BLOCKS, blocks), THREADS, call.stream, x, dy, magnitudes, f.channels,
             f.filters, static_cast<int32_t>(a.rows * a.height * a.width), pixels);
  const dim3 grid(static_cast<unsigned>(f.filters / 64 / FILTER_BLOCKS * f.across), static_cast<unsigned>(a.parts));
  constexpr int SHARED = Stage::COUNT * Stage::BYTES;
  MBC_LAUNCH_SHARED(fp32_emulated_halo_filter<FILTER_BLOCKS>, grid, HALO_THREADS, SHARED, call.stream, x, dy, magnitudes,
                    partial, f);
  add_parts(call.stream, partial, out<float>(call, 2), elements, a.parts * (CONSUMERS / Stage::SHARING), a.accumulate != 0);
}

}  // namespace mbc

extern "C" const char* mbc_fp32_emulated_halo_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<Fp32EmulatedArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  if (a.filters % 128 == 0)
    run_fp32_emulated_halo_filter<2>(call, a);
  else
    run_fp32_emulated_halo_filter<1>(call, a);
  return launched();
}
