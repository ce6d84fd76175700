// Convolutions in fp32, forward and back to the image at a stride of one, in three products of fp16 (fp32_emulated.cuh),
// channels last, by the 64.
//
// A block makes 128 pixels of 64 or 128 channels at a time. One of its warpgroups copies: pixels of the image under one
// place of the filter, 64 channels each, and weights that were divided into halves before. Two others multiply, each
// 64 pixels, whose words it divides itself; while one does that, tensor cores work for the other.
#include "fp32_emulated.cuh"

namespace mbc {

struct HalvesConvolution : ConvolutionShape {
  int32_t taps, chunks;
  int32_t pixels, across, tiles;  // of the output; tiles of filters, and of both
  bool backward;

  HalvesConvolution(const HalvesArguments& a, int n)
      : ConvolutionShape(a), taps(kernel_height * kernel_width), chunks(channels / HALF_TERMS),
        pixels(static_cast<int32_t>(a.rows * a.out_height * a.out_width)), across(filters / n),
        tiles(static_cast<int32_t>(divide_up(pixels, HALF_PIXELS)) * across), backward(a.backward != 0) {}
  __device__ int32_t stages() const { return taps * chunks; }
};

// Weights as tensor cores read them: for every stage of N filters a block of `HalvesStage::COPIED` bytes.
template <int N>
__global__ void prepare_weights(const float* __restrict__ weight, char* prepared, HalvesConvolution f) {
  __shared__ float tile[N][HALF_TERMS + 1];
  const int32_t stage = blockIdx.x, tap = stage / f.chunks, channel = stage % f.chunks * HALF_TERMS;
  const int32_t first = blockIdx.y * N;
  float largest = 0.0f;
  for (int32_t i = threadIdx.x; i < N * HALF_TERMS; i += PREPARE_THREADS) {
    const int32_t n = f.backward ? i % N : i / HALF_TERMS, c = f.backward ? i / N : i % HALF_TERMS;
    const int64_t at = f.backward
                           ? (static_cast<int64_t>(channel + c) * f.taps + f.taps - 1 - tap) * f.filters + first + n
                           : (static_cast<int64_t>(first + n) * f.taps + tap) * f.channels + channel + c;
    tile[n][c] = weight[at];
    largest = larger_finite(largest, tile[n][c]);
  }
  divide_operand<N>(
      tile, largest, prepared + (static_cast<int64_t>(blockIdx.y) * f.stages() + stage) * HalvesStage<N>::COPIED);
}

template <int N>
__device__ inline void copy_stages(
    const float* __restrict__ x, const char* __restrict__ prepared, char* stages, Ring<HalvesStage<N>::COUNT>& ring,
    const HalvesConvolution& f) {
  using Stage = HalvesStage<N>;
  constexpr int SIXTEENS = HALF_ROW / 32, APART = WARPGROUP / SIXTEENS, MINE = HALF_PIXELS / APART;
  const int32_t sixteen = threadIdx.x % SIXTEENS, mine = threadIdx.x / SIXTEENS;  // of either half of a pixel
  int32_t turn = 0;
  for (int32_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    // The image under the first place of the filter for each of this thread's pixels.
    int32_t at[MINE], corner[MINE];
    int32_t pixel = number / f.across * HALF_PIXELS + mine, line = pixel / f.out_width;
    int32_t column = pixel - line * f.out_width, n = line / f.out_height, row = line - n * f.out_height;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int32_t y = row * f.stride_height - f.pad_top, left = column * f.stride_width - f.pad_left;
      at[i] = ((n * f.height + y) * f.width + left) * f.channels + sixteen * 4;
      corner[i] = pixel + i * APART < f.pixels ? y * 65536 + left : f.height * 65536;
      for (column += APART; column >= f.out_width; column -= f.out_width)
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
      for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++turn, from += HALF_TERMS) {
        char* stage = stages + turn % Stage::COUNT * Stage::BYTES;
        ring.wait_until_emptied(turn);
        Barrier& filled = ring.filled[turn % Stage::COUNT];
        if (threadIdx.x == 0)
          filled.arrive_with_block(stage, weights + (tap * f.chunks + chunk) * static_cast<int64_t>(Stage::COPIED),
                                   Stage::COPIED);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
          const bool inside = (there >> i & 1) != 0;
          const float* pixel = inside ? from + at[i] : x;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            copy_16_bytes(reinterpret_cast<uint4*>(stage + Stage::IMAGE +
                                                   image_offset(mine + i * APART, sixteen + half * SIXTEENS)),
                          pixel + half * SIXTEENS * 4, inside);
        }
        filled.arrive_with_copies();
      }
    }
  }
}

template <int N>
__device__ inline void multiply_stages(
    const char* stages, float* __restrict__ y, Ring<HalvesStage<N>::COUNT>& ring, const HalvesConvolution& f) {
  using Stage = HalvesStage<N>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = (threadIdx.x / 32 - WARPGROUP / 32) * 16 + g;  // pixel
  const auto stage = [&](int32_t turn) { return stages + turn % Stage::COUNT * Stage::BYTES; };
  const auto fetch = [&](int32_t turn, int step, int h) {
    const char* image = stage(turn) + Stage::IMAGE;
    return load<4>(reinterpret_cast<const float*>(image + image_offset(first + 8 * h, 4 * step + t)));
  };
  const auto down = [&](int32_t turn) { return *reinterpret_cast<const float*>(stage(turn) + 2 * Stage::WEIGHTS); };
  float sums[N / 8][4] = {};
  int32_t number = blockIdx.x, left = f.stages();
  const auto write = [&](int32_t) {
    if (--left > 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t pixel = number / f.across * HALF_PIXELS + first + 8 * h;
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
  multiply_turns<false>(sums, mine * f.stages(), ring, fetch, stage, Stage::WEIGHTS, down, write);
}

template <int N>
__global__ void __launch_bounds__(RING_THREADS, 1)
    convolution_in_halves(const float* __restrict__ x, const char* __restrict__ prepared, float* __restrict__ y,
                          HalvesConvolution f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Ring<HalvesStage<N>::COUNT> ring;
  char* stages = aligned_shared(shared);
  if (threadIdx.x == 0) ring.start(WARPGROUP + 1);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<COPIER_REGISTERS>();
    copy_stages<N>(x, prepared, stages, ring, f);
  } else {
    take_registers<MULTIPLIER_REGISTERS>();
    multiply_stages<N>(stages, y, ring, f);
  }
}

template <int N>
void run_in_halves(const MbcCall& call, const HalvesArguments& a) {
  const HalvesConvolution f(a, N);
  char* prepared = out<char>(call, 3);
  const dim3 each(static_cast<unsigned>(f.taps * f.chunks), static_cast<unsigned>(f.across));
  MBC_LAUNCH(prepare_weights<N>, each, PREPARE_THREADS, call.stream, in<float>(call, 1), prepared, f);
  const unsigned blocks = static_cast<unsigned>(f.tiles < multiprocessors() ? f.tiles : multiprocessors());
  constexpr int SHARED = HalvesStage<N>::COUNT * HalvesStage<N>::BYTES + 1008;
  MBC_LAUNCH_SHARED(convolution_in_halves<N>, blocks, RING_THREADS, SHARED, call.stream, in<float>(call, 0), prepared,
                    out<float>(call, 2), f);
}

}  // namespace mbc

extern "C" const char* mbc_convolution_in_halves(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<HalvesArguments>(call);
  if (const char* problem = unaligned(call)) return problem;
  if (a.filters % 128 == 0)
    run_in_halves<128>(call, a);
  else
    run_in_halves<64>(call, a);
  return launched();
}
// The same; `backward` says that weights are turned.
extern "C" const char* mbc_convolution_backward_data_in_halves(const MbcCall& call) {
  return mbc_convolution_in_halves(call);
}
