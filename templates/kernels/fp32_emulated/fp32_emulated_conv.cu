// Convolution in emulated fp32 (3xFP16, see fp32_emulated.cuh), forward, and the data gradient at a stride of one.
// Channels last; channels and filters are multiples of 64.
//
// GEMM       M = output pixels, N = filters, K = filter taps * channels; implicit: the im2col matrix is never stored.
// Tile       128 pixels x 128 filters, or x 64 if filters are not a multiple of 128. A pipeline stage is K = 64: 64
//            channels under one filter tap. Blocks are persistent and take every gridDim.x-th tile.
// Warps      384 threads. Warpgroup 0 is the producer: it copies fp32 pixels with cp.async, and weights, which
//            `prepare_weights` split earlier, with one cp.async.bulk for each stage. Warpgroups 1 and 2 are consumers of
//            64 pixels each: they split their pixels in registers and start wgmma m64nNk16 with A in registers and B in
//            shared memory. While one splits, tensor cores work for the other.
// Shared     3 stages of 66,560 bytes at N = 128, 4 of 50,176 at N = 64.
// Registers  80 for a producer thread, 208 for a consumer thread (setmaxnreg).
// Limit      splitting by the consumer warps, not tensor cores: 350 instructions for the 12 wgmma of a stage.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of the accumulator of its 64 pixels:
//
//              columns   8j + 2t   8j + 2t + 1      j = 0 .. N/8 - 1
//   row 16w + g          d[j][0]     d[j][1]
//   row 16w + g + 8      d[j][2]     d[j][3]
#include "fp32_emulated.cuh"

namespace mbc {

struct EmulatedConv : ConvolutionShape {
  int32_t taps, chunks;
  int32_t pixels, across, tiles;  // pixels of the output; tiles of filters; tiles of both
  bool backward;

  EmulatedConv(const Fp32EmulatedArguments& a, int n)
      : ConvolutionShape(a), taps(kernel_height * kernel_width), chunks(channels / EMULATED_K),
        pixels(static_cast<int32_t>(a.rows * a.out_height * a.out_width)), across(filters / n),
        tiles(static_cast<int32_t>(divide_up(pixels, EMULATED_M)) * across), backward(a.backward != 0) {}
  __device__ int32_t stages() const { return taps * chunks; }
};

// Splits weights into the layout that wgmma reads: a block of `EmulatedStage::COPIED` bytes for every stage of N
// filters.
template <int N>
__global__ void prepare_weights(const float* __restrict__ weight, char* prepared, EmulatedConv f) {
  __shared__ float tile[N][EMULATED_K + 1];
  const int32_t stage = blockIdx.x, tap = stage / f.chunks, channel = stage % f.chunks * EMULATED_K;
  const int32_t first = blockIdx.y * N;
  float largest = 0.0f;
  for (int32_t i = threadIdx.x; i < N * EMULATED_K; i += PREPARE_THREADS) {
    const int32_t n = f.backward ? i % N : i / EMULATED_K, c = f.backward ? i / N : i % EMULATED_K;
    const int64_t at = f.backward
                           ? (static_cast<int64_t>(channel + c) * f.taps + f.taps - 1 - tap) * f.filters + first + n
                           : (static_cast<int64_t>(first + n) * f.taps + tap) * f.channels + channel + c;
    tile[n][c] = weight[at];
    largest = larger_finite(largest, tile[n][c]);
  }
  split_operand<N>(
      tile, largest, prepared + (static_cast<int64_t>(blockIdx.y) * f.stages() + stage) * EmulatedStage<N>::COPIED);
}

template <int N>
__device__ inline void produce_stages(
    const float* __restrict__ x, const char* __restrict__ prepared, char* stages,
    Pipeline<EmulatedStage<N>::COUNT>& pipeline, const EmulatedConv& f) {
  using Stage = EmulatedStage<N>;
  constexpr int SIXTEENS = EMULATED_ROW / 32, ROW_STRIDE = WARPGROUP / SIXTEENS, MINE = EMULATED_M / ROW_STRIDE;
  const int32_t sixteen = threadIdx.x % SIXTEENS, mine = threadIdx.x / SIXTEENS;  // 16 bytes of either half of a pixel
  int32_t iteration = 0;
  for (int32_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    // For each of this thread's pixels: the image's offset under the first filter tap, and that tap's row and column,
    // 16 bits each.
    int32_t at[MINE], corner[MINE];
    int32_t pixel = number / f.across * EMULATED_M + mine, line = pixel / f.out_width;
    int32_t column = pixel - line * f.out_width, n = line / f.out_height, row = line - n * f.out_height;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int32_t y = row * f.stride_height - f.pad_top, left = column * f.stride_width - f.pad_left;
      at[i] = ((n * f.height + y) * f.width + left) * f.channels + sixteen * 4;
      corner[i] = pixel + i * ROW_STRIDE < f.pixels ? y * 65536 + left : f.height * 65536;
      for (column += ROW_STRIDE; column >= f.out_width; column -= f.out_width)
        if (++row == f.out_height) {
          row = 0;
          ++n;
        }
    }
    const char* weights = prepared + static_cast<int64_t>(number % f.across) * f.stages() * Stage::COPIED;
    for (int32_t tap = 0; tap < f.taps; ++tap) {
      const int32_t down = tap / f.kernel_width, right = tap - down * f.kernel_width;
      uint32_t there = 0;
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        const int32_t left = static_cast<int16_t>(corner[i]), y = (corner[i] - left) / 65536 + down;
        there |= static_cast<uint32_t>(y >= 0 && y < f.height && left + right >= 0 && left + right < f.width) << i;
      }
      const float* from = x + (down * f.width + right) * f.channels;
      for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++iteration, from += EMULATED_K) {
        char* stage = stages + iteration % Stage::COUNT * Stage::BYTES;
        pipeline.producer_acquire(iteration);
        Barrier& full = pipeline.full[iteration % Stage::COUNT];
        if (threadIdx.x == 0)
          full.bulk_copy_arrive(stage, weights + (tap * f.chunks + chunk) * static_cast<int64_t>(Stage::COPIED),
                                   Stage::COPIED);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
          const bool inside = (there >> i & 1) != 0;
          const float* pixel = inside ? from + at[i] : x;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            cp_async_16(reinterpret_cast<uint4*>(stage + Stage::IMAGE +
                                                   image_offset(mine + i * ROW_STRIDE, sixteen + half * SIXTEENS)),
                          pixel + half * SIXTEENS * 4, inside);
        }
        full.cp_async_arrive();
      }
    }
  }
}

template <int N>
__device__ inline void consume_stages(
    const char* stages, float* __restrict__ y, Pipeline<EmulatedStage<N>::COUNT>& pipeline, const EmulatedConv& f) {
  using Stage = EmulatedStage<N>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = (threadIdx.x / 32 - WARPGROUP / 32) * 16 + g;  // pixel
  const auto stage = [&](int32_t iteration) { return stages + iteration % Stage::COUNT * Stage::BYTES; };
  const auto fetch = [&](int32_t iteration, int step, int h) {
    const char* image = stage(iteration) + Stage::IMAGE;
    return load<4>(reinterpret_cast<const float*>(image + image_offset(first + 8 * h, 4 * step + t)));
  };
  const auto down = [&](int32_t iteration) {
    return *reinterpret_cast<const float*>(stage(iteration) + 2 * Stage::WEIGHTS);
  };
  float sums[N / 8][4] = {};
  int32_t number = blockIdx.x, left = f.stages();
  const auto write = [&](int32_t) {
    if (--left > 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t pixel = number / f.across * EMULATED_M + first + 8 * h;
      float* to = y + static_cast<int64_t>(pixel) * f.filters + number % f.across * N + 2 * t;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        if (pixel < f.pixels) store(to + 8 * j, Vec<float, 2>{{sums[j][2 * h], sums[j][2 * h + 1]}});
        sums[j][2 * h] = sums[j][2 * h + 1] = 0.0f;
      }
    }
    left = f.stages();
    number += gridDim.x;
  };
  const int32_t mine = number < f.tiles ? (f.tiles - 1 - number) / gridDim.x + 1 : 0;
  consume_stages_3xfp16<false>(sums, mine * f.stages(), pipeline, fetch, stage, Stage::WEIGHTS, down, write);
}

template <int N>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    fp32_emulated_conv(const float* __restrict__ x, const char* __restrict__ prepared, float* __restrict__ y,
                          EmulatedConv f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<EmulatedStage<N>::COUNT> pipeline;
  char* stages = aligned_shared(shared);
  if (threadIdx.x == 0) pipeline.start(WARPGROUP + 1);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce_stages<N>(x, prepared, stages, pipeline, f);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume_stages<N>(stages, y, pipeline, f);
  }
}

template <int N>
void run_fp32_emulated(const MbcCall& call, const Fp32EmulatedArguments& a) {
  const EmulatedConv f(a, N);
  char* prepared = out<char>(call, 3);
  const dim3 each(static_cast<unsigned>(f.taps * f.chunks), static_cast<unsigned>(f.across));
  MBC_LAUNCH(prepare_weights<N>, each, PREPARE_THREADS, call.stream, in<float>(call, 1), prepared, f);
  const unsigned blocks = static_cast<unsigned>(f.tiles < multiprocessors() ? f.tiles : multiprocessors());
  constexpr int SHARED = EmulatedStage<N>::COUNT * EmulatedStage<N>::BYTES + 1008;
  MBC_LAUNCH_SHARED(fp32_emulated_conv<N>, blocks, PIPELINE_THREADS, SHARED, call.stream, in<float>(call, 0), prepared,
                    out<float>(call, 2), f);
}

}  // namespace mbc

// Data gradients, too, with transposed and rotated weights (`backward`).
extern "C" const char* mbc_fp32_emulated_conv(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<Fp32EmulatedArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  if (a.filters % 128 == 0)
    run_fp32_emulated<128>(call, a);
  else
    run_fp32_emulated<64>(call, a);
  return launched();
}
