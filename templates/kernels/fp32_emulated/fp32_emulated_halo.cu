// Convolution in emulated fp32 (3xFP16, see fp32_emulated.cuh) with filters of several taps, forward and data gradient,
// at a stride of one. Every word of the image is split once for all filter taps. Channels last; channels and filters
// are multiples of 64.
//
// GEMM       M = filters, N = output pixels, K = filter taps * channels: pixels are the columns, so that 64 filters
//            fill a tile as well as 128 filters do.
// Tile       64 filters x 256 pixels, which are consecutive, or a box of 8 columns by 32 rows (halo.cuh). A block holds
//            the image of the tile with its halo, up to 379 pixels of 64 channels, split into high and low words. The
//            operand of the next filter tap is the same halo, shifted by some pixels: core matrices without swizzle may
//            begin at any multiple of 16 bytes. A weight stage is one tap of 64 channels.
// Warps      512 threads. Warp 0 is the producer of weights, which `prepare_fragments` split earlier (one
//            cp.async.bulk for each stage). Warps 1 to 7 read and split halos. Warpgroups 2 and 3 are consumers of 128
//            pixels each: wgmma m64n128k16, weights in registers (A), pixels in shared memory (B).
// Scale      a power of two for the finite words of a halo of 64 channels; one for each filter and K = 64 of weights.
// Shared     2 halos of 97,024 bytes and 2 weight stages of 16,640 bytes.
// Registers  56 for a producer or splitting thread, 200 for a consumer thread (setmaxnreg).
// Limit      tensor cores, 72 % busy; consumers wait for halos 14 % of their time, because words are read twice, once
//            for their scale (decision 032).
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds:
//
//   weights (A, K = 16 s ..)                       accumulator, of 64 filters x 128 pixels, j = 0 .. 15
//                k = 2t, 2t+1   2t+8, 2t+9                       pixels   8j + 2t   8j + 2t + 1
//   16w + g        a[s][0]        a[s][2]            filter 16w + g       d[j][0]     d[j][1]
//   16w + g + 8    a[s][1]        a[s][3]            filter 16w + g + 8   d[j][2]     d[j][3]
#include "fp32_emulated_halo.cuh"
#include "halo.cuh"

namespace mbc {

constexpr int HALO_BYTES = MOST_HALO_PIXELS * EMULATED_K * 4, HALOS = 2;
constexpr int FRAGMENTS_BYTES = HALO_FILTERS * EMULATED_K * 4;  // weights of a stage; their scales follow
constexpr int WEIGHTS_BYTES = FRAGMENTS_BYTES + HALO_FILTERS * 4, WEIGHTS = 2;
constexpr int HALO_SPLITTER_REGISTERS = 56, HALO_CONSUMER_REGISTERS = 200;  // 64 K registers in all
constexpr int SPLITTING = SPLITTERS - 32, FRAGMENT_THREADS = 256;
// Distance of a thread's halo pixels, and the number of them in flight.
constexpr int SPLIT_STRIDE = SPLITTING / 8, SPLIT_AT_ONCE = 4, SPLIT_ROUND = SPLIT_STRIDE * SPLIT_AT_ONCE;
constexpr int LOCATED_PIXELS = (MOST_HALO_PIXELS / SPLIT_ROUND + 1) * SPLIT_ROUND;

struct EmulatedHaloConv : HaloConv {
  GridPixel locate_step;

  static_assert(HALO_CHANNELS == EMULATED_K);
  explicit EmulatedHaloConv(const HaloArguments& a)
      : HaloConv(a), locate_step(locate(8 * SPLIT_STRIDE)) {}
  __device__ int32_t stages() const { return taps * chunks; }
};

// Splits weights into A fragments of wgmma. For every stage of 64 filters they are, for each K = 16, the high and the
// low fp16 words of each thread, and then the inverse scale of each filter.
__global__ void prepare_fragments(const float* __restrict__ weight, char* prepared, EmulatedHaloConv f) {
  __shared__ float tile[HALO_FILTERS][EMULATED_K + 1], up[HALO_FILTERS];
  const int32_t stage = blockIdx.x, channel = stage / f.taps * EMULATED_K, tap = stage % f.taps;
  const int32_t first = blockIdx.y * HALO_FILTERS;
  for (int32_t i = threadIdx.x; i < HALO_FILTERS * EMULATED_K; i += FRAGMENT_THREADS) {
    const int32_t n = f.backward ? i % HALO_FILTERS : i / EMULATED_K;
    const int32_t c = f.backward ? i / HALO_FILTERS : i % EMULATED_K;
    const int64_t at = f.backward
                           ? (static_cast<int64_t>(channel + c) * f.taps + f.taps - 1 - tap) * f.filters + first + n
                           : (static_cast<int64_t>(first + n) * f.taps + tap) * f.channels + channel + c;
    tile[n][c] = weight[at];
  }
  __syncthreads();
  char* to = prepared + (static_cast<int64_t>(blockIdx.y) * f.stages() + stage) * WEIGHTS_BYTES;
  if (threadIdx.x < HALO_FILTERS) {
    float largest = 0.0f;
    for (int32_t c = 0; c < EMULATED_K; ++c) largest = larger_finite(largest, tile[threadIdx.x][c]);
    const SplitScale scale(largest);
    up[threadIdx.x] = scale.up;
    reinterpret_cast<float*>(to + FRAGMENTS_BYTES)[threadIdx.x] = scale.down;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < EMULATED_K_STEPS * WARPGROUP; i += FRAGMENT_THREADS) {
    const int32_t step = i / WARPGROUP, lane = i % 32, n = i % WARPGROUP / 32 * 16 + lane / 4;
    uint32_t high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t row = n + e % 2 * 8;
      const float* two = tile[row] + step * 16 + lane % 4 * 2 + e / 2 * 8;
      const SplitPair split = split_pair(two[0] * up[row], two[1] * up[row]);
      high[e] = split.high;
      low[e] = split.low;
    }
    uint4* fragments = reinterpret_cast<uint4*>(to) + step * 2 * WARPGROUP + i % WARPGROUP;
    fragments[0] = {high[0], high[1], high[2], high[3]};
    fragments[WARPGROUP] = {low[0], low[1], low[2], low[3]};
  }
}

struct HaloPipelines {
  Pipeline<HALOS> halos;
  Pipeline<WEIGHTS> weights;
  Barrier agreed;  // all agree on the largest magnitude of a halo
  float largest[2][SPLITTING / 32], down[HALOS];
  int32_t offsets[LOCATED_PIXELS];                     // offsets of halo pixels in the image
  int32_t outputs[2][HALO_GROUPS * 8];       // offsets of a tile's results

  __device__ void start() {
    halos.start(SPLITTING);
    weights.start(1);
    agreed.start(SPLITTING / 32);
    fence_mbarrier_init();
  }
};

__device__ inline void produce_weights(
    const char* __restrict__ prepared, char* stages, HaloPipelines& pipelines, const EmulatedHaloConv& f) {
  int32_t iteration = 0;
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x) {
    const char* from = prepared + static_cast<int64_t>(tile % f.across) * f.stages() * WEIGHTS_BYTES;
    for (int32_t stage = 0; stage < f.stages(); ++stage, ++iteration, from += WEIGHTS_BYTES) {
      pipelines.weights.producer_acquire(iteration);
      char* to = stages + iteration % WEIGHTS * WEIGHTS_BYTES;
      pipelines.weights.full[iteration % WEIGHTS].bulk_copy_arrive(to, from, WEIGHTS_BYTES);
    }
  }
}

// The offset in the image of each halo pixel of a tile, in elements, or -1 for padding. A warp locates the pixels whose
// words it splits, so that the block needs no barrier.
__device__ inline void locate_halo_pixels(
    int32_t* offsets, int32_t tile, int32_t mine, int32_t eight, const EmulatedHaloConv& f) {
  const int32_t left = f.left(tile), first = mine + eight * SPLIT_STRIDE;
  GridPixel at = f.first_halo_pixel(tile, first);
  __syncwarp();  // those of the last tile have been read
  for (int32_t i = first; i < LOCATED_PIXELS; i += 8 * SPLIT_STRIDE) {
    offsets[i] = i < f.halo_pixels() ? f.input_offset(at, left) : -1;
    f.advance(at, f.locate_step);
  }
  __syncwarp();
}

// Offset in the output of each pixel of a tile, in elements, or -1 outside the output.
__device__ inline void find_outputs(int32_t* offsets, int32_t tile, int32_t thread, const EmulatedHaloConv& f) {
  const int32_t first = f.first(tile), left = f.left(tile);
  for (int32_t i = thread; i < HALO_GROUPS * 8; i += SPLITTING)
    offsets[i] = f.output_offset(f.locate(first + i / 8 * f.group + i % 8), left);
}

// Calls `use` with eight channels of every halo pixel of a thread, several pixels in flight.
template <typename Use>
__device__ inline void for_halo_pixels(
    const float* x, const int32_t* offsets, int32_t mine, int32_t halo_pixels, Use use) {
  for (int32_t i = mine; i < halo_pixels; i += SPLIT_ROUND) {
    Vec<float, 4> words[SPLIT_AT_ONCE][2];
#pragma unroll
    for (int e = 0; e < SPLIT_AT_ONCE; ++e) {
      const int32_t offset = offsets[i + e * SPLIT_STRIDE];
#pragma unroll
      for (int h = 0; h < 2; ++h) words[e][h] = offset >= 0 ? load<4>(x + offset + 4 * h) : Vec<float, 4>{};
    }
#pragma unroll
    for (int e = 0; e < SPLIT_AT_ONCE; ++e) use(i + e * SPLIT_STRIDE, words[e]);
  }
}

__device__ inline void split_halos(
    const float* __restrict__ x, char* halos, HaloPipelines& pipelines, const EmulatedHaloConv& f) {
  const int32_t thread = threadIdx.x - 32, eight = thread % 8, mine = thread / 8, halo_pixels = f.halo_pixels();
  int32_t iteration = 0, agreed = 0, number = 0;  // halos, maxima, tiles so far
  const auto largest_of_all = [&](float largest) {
    largest = largest_of_warp(largest);
    if (thread % 32 == 0) {
      pipelines.largest[agreed % 2][thread / 32] = largest;
      pipelines.agreed.arrive();
    }
    pipelines.agreed.wait(agreed % 2);
#pragma unroll
    for (int warp = 0; warp < SPLITTING / 32; ++warp) largest = max(largest, pipelines.largest[agreed % 2][warp]);
    ++agreed;
    return largest;
  };
  for (int32_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x, ++number) {
    locate_halo_pixels(pipelines.offsets, tile, mine, eight, f);
    const float* of_thread = x + eight * 8;
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++iteration, of_thread += EMULATED_K) {
      float largest = 0.0f;
      for_halo_pixels(of_thread, pipelines.offsets, mine, halo_pixels, [&](int32_t, const Vec<float, 4>(&words)[2]) {
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, fabsf(words[e / 4].v[e % 4]));
      });
      largest = largest_of_all(largest);
      if (largest > FLT_MAX) {
        largest = 0.0f;
        for_halo_pixels(of_thread, pipelines.offsets, mine, halo_pixels, [&](int32_t, const Vec<float, 4>(&words)[2]) {
          for (int e = 0; e < 8; ++e) largest = larger_finite(largest, words[e / 4].v[e % 4]);
        });
        largest = largest_of_all(largest);
      }
      const SplitScale scale(largest);
      pipelines.halos.producer_acquire(iteration);
      if (chunk == 0) find_outputs(pipelines.outputs[number % 2], tile, thread, f);
      char* halo = halos + iteration % HALOS * HALO_BYTES + eight * f.chunk_pitch;
      for_halo_pixels(of_thread, pipelines.offsets, mine, halo_pixels, [&](int32_t pixel, const Vec<float, 4>(&words)[2]) {
        uint4 high, low;
        split_eight(words, scale.up, high, low);
        if (pixel >= halo_pixels) return;
        *reinterpret_cast<uint4*>(halo + pixel * 16) = high;
        *reinterpret_cast<uint4*>(halo + 8 * f.chunk_pitch + pixel * 16) = low;
      });
      if (thread == 0) pipelines.down[iteration % HALOS] = scale.down;
      fence_proxy_async();
      pipelines.halos.full[iteration % HALOS].arrive();
    }
  }
}

__device__ inline void consume_tiles(
    const char* halos, const char* stages, float* __restrict__ y, HaloPipelines& pipelines, const EmulatedHaloConv& f) {
  const int32_t thread = threadIdx.x % WARPGROUP, lane = thread % 32, group = (threadIdx.x - SPLITTERS) / WARPGROUP * 16;
  const int32_t row = thread / 32 * 16 + lane / 4;  // filter, and the one eight below
  int32_t iteration = 0, halo_iteration = 0, number = 0;
  const int32_t first_tile = static_cast<int32_t>(blockIdx.x), step = static_cast<int32_t>(gridDim.x);
  const int32_t iterations = (f.tiles - first_tile + step - 1) / step * f.stages();
  // Weights of K = 32: those of the next stage are fetched while the last wgmma of this stage run.
  uint32_t former[2][2][4], latter[2][2][4];
  const auto fetch = [&](uint32_t(&weights)[2][2][4], int32_t of_iteration, int first_step) {
    const uint4* fragments = reinterpret_cast<const uint4*>(stages + of_iteration % WEIGHTS * WEIGHTS_BYTES);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = fragments[(first_step * 2 + i) * WARPGROUP + thread];
      memcpy(weights[i / 2][i % 2], &four, sizeof(four));
    }
  };
  pipelines.weights.consumer_wait(0);
  fetch(former, 0, 0);
  fetch(latter, 0, 2);
  for (int32_t tile = first_tile; tile < f.tiles; tile += step, ++number) {
    float sums[16][4] = {};
    int32_t outputs[2][2];  // lane 4 j + t: offsets of pixels 2 t and 2 t + 1 of group j, and of group j + 8
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++halo_iteration) {
      pipelines.halos.consumer_wait(halo_iteration);
      const char* line = halos + halo_iteration % HALOS * HALO_BYTES + group * f.group * 16;
      if (chunk == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          outputs[i / 2][i % 2] =
              pipelines.outputs[number % 2][(group + i / 2 * 8 + lane / 4) * 8 + lane % 4 * 2 + i % 2];
      const float halo_down = pipelines.down[halo_iteration % HALOS] * TRUNCATION_COMPENSATION;
      for (int32_t tap = 0, across = 0; tap < f.taps; ++tap, ++iteration) {
        const char* stage = stages + iteration % WEIGHTS * WEIGHTS_BYTES;
        const float* of_filters = reinterpret_cast<const float*>(stage + FRAGMENTS_BYTES) + row;
        const float down[2] = {of_filters[0] * halo_down, of_filters[8] * halo_down};
        float part[16][4];
        const auto start = [&](const uint32_t(&weights)[2][2][4], int first_step) {
          const auto at = [&](int s) {
            return CoreMatrices{line, f.group * 16, f.chunk_pitch, across * 16 + (first_step + s) * 2 * f.chunk_pitch};
          };
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const CoreMatrices high = at(s);
            const CoreMatrices low{line, f.group * 16, f.chunk_pitch, high.begin + 8 * f.chunk_pitch};
            wgmma_rs<false, __half>(part, weights[s][1], high, first_step + s > 0);
            wgmma_rs<false, __half>(part, weights[s][0], low, true);
          }
#pragma unroll
          for (int s = 0; s < 2; ++s)
            wgmma_rs<false, __half>(part, weights[s][0], at(s), true);
          wgmma_commit();
        };
        start(former, 0);
        start(latter, 2);
        pipelines.weights.consumer_release(iteration);  // its words are in registers
        const bool goes_on = iteration + 1 < iterations;
        wgmma_wait<1>(part);
        if (goes_on) pipelines.weights.consumer_wait(iteration + 1);
        if (goes_on) fetch(former, iteration + 1, 0);
        wgmma_wait(part);
        if (goes_on) fetch(latter, iteration + 1, 2);
        if (++across == f.kernel_width) {
          across = 0;
          line += f.pitch * 16;
        }
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int v = 0; v < 4; ++v) sums[j][v] += part[j][v] * down[v / 2];
      }
      pipelines.halos.consumer_release(halo_iteration);
    }
    float* to = y + tile % f.across * HALO_FILTERS + row;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t offset = __shfl_sync(0xffffffffu, outputs[j / 8][e], j % 8 * 4 + lane % 4);
        if (offset >= 0) {
          to[offset] = sums[j][e];
          to[offset + 8] = sums[j][2 + e];
        }
      }
  }
}

__global__ void __launch_bounds__(HALO_THREADS, 1)
    fp32_emulated_halo_conv(const float* __restrict__ x, const char* __restrict__ prepared, float* __restrict__ y,
                           EmulatedHaloConv f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ HaloPipelines pipelines;
  char* halos = reinterpret_cast<char*>(shared);
  char* weights = halos + HALOS * HALO_BYTES;
  if (threadIdx.x == 0) pipelines.start();
  __syncthreads();
  if (threadIdx.x < SPLITTERS) {
    setmaxnreg_dec<HALO_SPLITTER_REGISTERS>();
    if (threadIdx.x >= 32)
      split_halos(x, halos, pipelines, f);
    else if (threadIdx.x == 0)
      produce_weights(prepared, weights, pipelines, f);
  } else {
    setmaxnreg_inc<HALO_CONSUMER_REGISTERS>();
    consume_tiles(halos, weights, y, pipelines, f);
  }
}

}  // namespace mbc

// Data gradients, too, with transposed and rotated weights (`backward`).
extern "C" const char* mbc_fp32_emulated_halo(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<HaloArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  const EmulatedHaloConv f(a);
  if (f.halo_pixels() > MOST_HALO_PIXELS) return "a halo is larger than shared memory";
  char* prepared = out<char>(call, 3);
  const dim3 each(static_cast<unsigned>(f.taps * f.chunks), static_cast<unsigned>(f.across));
  MBC_LAUNCH(prepare_fragments, each, FRAGMENT_THREADS, call.stream, in<float>(call, 1), prepared, f);
  const unsigned blocks = static_cast<unsigned>(f.tiles < multiprocessors() ? f.tiles : multiprocessors());
  constexpr int SHARED = HALOS * HALO_BYTES + WEIGHTS * WEIGHTS_BYTES;
  // As in mbc/kernels/cuda/conv/halo.py.
  static_assert(SHARED + sizeof(HaloPipelines) <= 226 << 10);
  MBC_LAUNCH_SHARED(fp32_emulated_halo_conv, blocks, HALO_THREADS, SHARED, call.stream, in<float>(call, 0), prepared,
                    out<float>(call, 2), f);
  return launched();
}
