// Non-overlapping transposed convolution (stride = filter size) of images and volumes, in bf16 and fp16, which is also the data gradient of
// such a convolution; optionally with a bias, as a part of a concatenation. Channels last.
//
// GEMM       M = pixels of the smaller image, N = filter taps * channels, K = filters. The result is rearranged when it
//            is written: each pixel becomes as many pixels of the larger image as a filter has taps.
// Tile       128 pixels x 256 columns; a pipeline stage is K = 64. A block keeps its columns and walks from one tile of
//            pixels to the next; if the stages hold all of K, weights are copied once and stay.
// Warps      384 threads. Two warps of warpgroup 0 are producers (cp.async), and the two others copy the other part of
//            the concatenation, if there is one, while tensor cores are busy. Warpgroups 1 and 2 are consumers of 64
//            pixels each: wgmma m64n256k16, pixels (A, rows of 128 bytes with swizzle) and weights (B, rows are K) in
//            shared memory.
// Epilogue   rounded as in the convolution alone, then the bias is added; four threads exchange words, so that each
//            writes 16 bytes.
// Shared     4 stages of 49,152 bytes; with a concatenation 24,576 bytes more for copies in flight.
// Registers  80 for a thread of warpgroup 0, 208 for a consumer thread (setmaxnreg).
// Limit      the bytes that are written.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w of a consumer holds, of 64 pixels x 256 columns:
//
//               columns   8j + 2t   8j + 2t + 1      after `exchange`: of columns 8(j + t) .. 8(j + t) + 7,
//   pixel 16w + g         d[j][0]     d[j][1]        j a multiple of four, 16 bytes of row 16w + g, and of
//   pixel 16w + g + 8     d[j][2]     d[j][3]        row 16w + g + 8
#include "conv_operands.cuh"
#include "pipeline.cuh"
#include "conv_transpose_nonoverlapping_arguments.h"
#include "conv_transpose_nonoverlapping_operands.h"

namespace mbc {

// Equal to the constants in mbc/kernels/cuda/conv/conv_transpose_nonoverlapping.py: a tile, and K of a stage.
constexpr int TRANSPOSE_PIXELS = 128, TRANSPOSE_COLUMNS = 256, TRANSPOSE_K = 64;
// Two warps are producers, two copy the other part of a concatenation; two warpgroups are consumers.
constexpr int PRODUCERS = 64;

struct ConvTransposeStage {
  static constexpr int COUNT = 4;
  static constexpr int WEIGHTS = TRANSPOSE_PIXELS * SWIZZLE_ROW;  // offset, after the pixels; rows of 64 filters
  static constexpr int BLOCKS = TRANSPOSE_COLUMNS / 64;
  static constexpr int BYTES = WEIGHTS + BLOCKS * SWIZZLE_BLOCK;
};

struct ConvTranspose : ConvolutionShape {
  int32_t pixels, chunks, across;  // pixels of the smaller image; stages of K; blocks of columns
  int32_t kernel_depth;            // planes of a filter; planes of the smaller volume are images here
  int64_t columns, all, start;     // columns of the GEMM; channels of the written tensor
  bool kept;                       // whether a stage always has the same weights, which are then copied once

  explicit ConvTranspose(const ConvTransposeArguments& a)
      : ConvolutionShape(a), pixels(static_cast<int32_t>(a.rows * a.out_height * a.out_width)),
        chunks(filters / TRANSPOSE_K), kernel_depth(narrow(a.kernel_depth)),
        columns(a.kernel_depth * a.kernel_height * a.kernel_width * a.channels), all(a.all), start(a.start) {
    across = static_cast<int32_t>(columns / TRANSPOSE_COLUMNS);
    kept = ConvTransposeStage::COUNT % chunks == 0;
  }
  __host__ __device__ int32_t tiles() const { return (pixels + TRANSPOSE_PIXELS - 1) / TRANSPOSE_PIXELS; }
  __host__ __device__ int64_t image_pixels() const { return int64_t{pixels} * kernel_depth * kernel_height * kernel_width; }

  // A block computes the same columns of one tile of pixels after another.
  __device__ int32_t first_column() const { return static_cast<int32_t>(blockIdx.x) % across * TRANSPOSE_COLUMNS; }
  __device__ int32_t first_tile() const { return static_cast<int32_t>(blockIdx.x) / across; }
  __device__ int32_t step() const { return static_cast<int32_t>(gridDim.x) / across; }

  // The element of the larger image where the window of a pixel begins.
  __device__ int64_t window(int32_t pixel) const {
    const GridPixel at = PixelGrid{out_height, out_width}.locate(pixel);
    const int64_t line = static_cast<int64_t>(at.image) * kernel_depth * height + at.line * kernel_height;
    return (line * width + at.column * kernel_width) * all + start;
  }
  // The offset from the window's first element to the element of a column of the GEMM.
  __device__ int64_t of_column(int32_t column) const {
    const int32_t tap = column / channels, down = tap / kernel_width, deep = down / kernel_height;
    const int64_t line = static_cast<int64_t>(deep) * height + down - deep * kernel_height;
    return (line * width + tap - down * kernel_width) * all + column - tap * channels;
  }
};

template <typename T>
__device__ inline void produce_operands(const T* __restrict__ dy, const T* __restrict__ weight, char* stages,
                                      Pipeline<ConvTransposeStage::COUNT>& pipeline, const ConvTranspose& f) {
  constexpr int ROW_STRIDE = PRODUCERS / 8;  // rows between two rows of a thread
  const int32_t sixteen = threadIdx.x % 8, mine = threadIdx.x / 8;
  const T* columns = weight + mine * f.columns + f.first_column() + sixteen * 8;
  int32_t iteration = 0;
  for (int32_t tile = f.first_tile(); tile < f.tiles(); tile += f.step()) {
    const int32_t first = tile * TRANSPOSE_PIXELS + mine;
    const T* pixels = dy + static_cast<int64_t>(first) * f.filters + sixteen * 8;
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++iteration) {
      char* stage = stages + iteration % ConvTransposeStage::COUNT * ConvTransposeStage::BYTES;
      pipeline.producer_acquire(iteration);
#pragma unroll
      for (int i = 0; i < TRANSPOSE_PIXELS; i += ROW_STRIDE) {
        const bool there = first + i < f.pixels;
        cp_async_16(reinterpret_cast<uint4*>(stage + swizzled_offset(mine + i, sixteen)),
                      there ? pixels + i * f.filters + chunk * TRANSPOSE_K : dy, there);
      }
      if (iteration < ConvTransposeStage::COUNT || !f.kept) {
        const T* k_rows = columns + chunk * TRANSPOSE_K * f.columns;
#pragma unroll
        for (int i = 0; i < TRANSPOSE_K; i += ROW_STRIDE)
#pragma unroll
          for (int b = 0; b < ConvTransposeStage::BLOCKS; ++b)
            cp_async_16(reinterpret_cast<uint4*>(stage + ConvTransposeStage::WEIGHTS + b * SWIZZLE_BLOCK +
                                                   swizzled_offset(mine + i, sixteen)),
                          k_rows + i * f.columns + b * 64, true);
      }
      pipeline.full[iteration % ConvTransposeStage::COUNT].cp_async_arrive();
    }
  }
}

// Copies the other part of a concatenation, divided among all blocks. Copies in flight go through a `buffer` in shared
// memory, in which each thread has its own addresses: registers would not suffice. A thread keeps its eight channels and
// walks down the pixels, so that few instructions of its two warps stand between copies.
struct ConcatCopy {
  static constexpr int THREADS = WARPGROUP - PRODUCERS, AT_ONCE = 4, STAGES = 6;
  static constexpr int BYTES = THREADS * AT_ONCE * STAGES * 16;
};

template <typename T>
__device__ inline void copy_concat_part(const T* __restrict__ from, T* __restrict__ to, const ConvTranspose& f, uint4* buffer) {
  constexpr int N = WIDTH<T>, AT_ONCE = ConcatCopy::AT_ONCE;
  const int32_t thread = threadIdx.x - PRODUCERS, index = static_cast<int32_t>(blockIdx.x) * ConcatCopy::THREADS + thread;
  const int32_t channels = static_cast<int32_t>(f.all) - f.channels, vectors = channels / N;
  const int32_t step = static_cast<int32_t>(gridDim.x) * ConcatCopy::THREADS / vectors;  // pixels
  const int32_t pixel = index / vectors, pixels = static_cast<int32_t>(f.image_pixels());
  int32_t left = pixel < min(step, pixels) ? (pixels - pixel - 1) / step + 1 : 0, unfetched = left;
  const T* source = from + int64_t{index} * N;
  T* target = to + pixel * f.all + (index - pixel * vectors) * N;
  const int64_t source_step = int64_t{step} * channels, target_step = step * f.all;
  const auto fetch = [&](uint4* slots) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k, source += source_step)
      cp_async_16(slots + k * ConcatCopy::THREADS, k < unfetched ? source : from, k < unfetched);
    unfetched -= AT_ONCE;
    cp_async_commit();
  };
  for (int32_t stage = 0; stage < ConcatCopy::STAGES; ++stage) fetch(buffer + thread + stage * AT_ONCE * ConcatCopy::THREADS);
  for (int32_t stage = 0; left > 0; left -= AT_ONCE, stage = stage + 1 < ConcatCopy::STAGES ? stage + 1 : 0) {
    uint4* const slots = buffer + thread + stage * AT_ONCE * ConcatCopy::THREADS;
    cp_async_wait<ConcatCopy::STAGES - 1>();
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k, target += target_step)
      if (k < left) store_held(target, hold<N>(reinterpret_cast<const T*>(slots + k * ConcatCopy::THREADS)));
    fetch(slots);
  }
  cp_async_wait<0>();
}

// Four threads have four words each: thread t receives the t-th words of all four, in the order of threads.
__device__ inline void exchange(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int mask = 2; mask > 0; mask /= 2) {
    const bool upper = (t & mask) != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int low = mask == 2 ? k : 2 * k, high = low + mask;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], mask);
      words[low] = upper ? other : words[low];
      words[high] = upper ? words[high] : other;
    }
  }
}

// Constants of the columns of a block.
struct ConvTransposeColumns {
  int64_t offset[TRANSPOSE_COLUMNS / 32];  // offsets of 32 columns from the beginning of a window
  alignas(32) float bias[TRANSPOSE_COLUMNS];
};

// Rounds as in the convolution alone, then adds the bias.
template <typename T, bool BIAS>
__device__ inline void write_tile(const float (&sums)[TRANSPOSE_COLUMNS / 8][4], const ConvTransposeColumns& columns,
                                  T* __restrict__ y, int32_t first, const ConvTranspose& f) {
  const int t = threadIdx.x % 4;
  T* const window[2] = {y + f.window(first) + 8 * t, y + f.window(first + 8) + 8 * t};
#pragma unroll
  for (int j = 0; j < TRANSPOSE_COLUMNS / 8; j += 4) {
    const int64_t offset = columns.offset[j / 4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Held<T, 8> packed;
#pragma unroll
      for (int k = 0; k < 4; ++k) packed.words[k] = rounded_word<T>(sums[j + k] + 2 * h);
      exchange(packed.words, t);
      if (first + 8 * h >= f.pixels) continue;
      if constexpr (BIAS) {
        auto biased = load<8>(columns.bias + (j + t) * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) biased.v[e] += to_float(packed[e]);
        store_floats(window[h] + offset, biased.v);
      } else {
        store_held(window[h] + offset, packed);
      }
    }
  }
}

template <typename T, bool BIAS>
__device__ inline void consume_tiles(const char* stages, const ConvTransposeColumns& columns, T* y,
                                  Pipeline<ConvTransposeStage::COUNT>& pipeline, const ConvTranspose& f) {
  const int32_t group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % 32;
  const int32_t mine = group * 64 + threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
  float sums[TRANSPOSE_COLUMNS / 8][4];
  int32_t iteration = 0;
  for (int32_t tile = f.first_tile(); tile < f.tiles(); tile += f.step()) {
    for (int32_t chunk = 0; chunk < f.chunks; ++chunk, ++iteration) {
      const char* stage = stages + iteration % ConvTransposeStage::COUNT * ConvTransposeStage::BYTES;
      pipeline.consumer_wait(iteration);
      fence_proxy_async();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < TRANSPOSE_K / 16; ++step)
        wgmma_ss<true, T>(sums, stage + group * SWIZZLE_BLOCK + step * 32,
                                 stage + ConvTransposeStage::WEIGHTS + step * 16 * SWIZZLE_ROW, chunk > 0 || step > 0);
      wgmma_commit();
      wgmma_wait(sums);
      pipeline.consumer_release(iteration);
    }
    write_tile<T, BIAS>(sums, columns, y, tile * TRANSPOSE_PIXELS + mine, f);
  }
}

template <typename T, bool CONCAT>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    conv_transpose(const T* __restrict__ dy, const T* __restrict__ weight, const float* __restrict__ bias,
                  const T* __restrict__ other, T* __restrict__ y, ConvTranspose f) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<ConvTransposeStage::COUNT> pipeline;
  __shared__ ConvTransposeColumns columns;
  char* stages = aligned_shared(shared);
  for (int32_t i = threadIdx.x; i < TRANSPOSE_COLUMNS; i += PIPELINE_THREADS) {
    const int32_t column = f.first_column() + i;
    if (i % 32 == 0) columns.offset[i / 32] = f.of_column(column);
    if constexpr (CONCAT) columns.bias[i] = bias[column % f.channels];
  }
  if (threadIdx.x == 0) pipeline.start(PRODUCERS);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < PRODUCERS)
      produce_operands(dy, weight, stages, pipeline, f);
    else if constexpr (CONCAT)
      copy_concat_part(other, y + (f.start == 0 ? f.channels : 0), f,
                  reinterpret_cast<uint4*>(stages + ConvTransposeStage::COUNT * ConvTransposeStage::BYTES));
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume_tiles<T, CONCAT>(stages, columns, y, pipeline, f);
  }
}

// CONCAT: a bias is added, and the other part of a concatenation is copied.
template <bool CONCAT, typename T>
void run_conv_transpose(const MbcCall& call, const ConvTransposeNonoverlappingOperands& at) {
  const ConvTranspose f(arguments<ConvTransposeArguments>(call));
  const int64_t most = max(int64_t{1}, multiprocessors() / f.across);
  const unsigned blocks = static_cast<unsigned>(min(int64_t{f.tiles()}, most)) * f.across;
  constexpr int SHARED = ConvTransposeStage::COUNT * ConvTransposeStage::BYTES + (CONCAT ? ConcatCopy::BYTES : 0) + 1008;
  MBC_LAUNCH_SHARED((conv_transpose<T, CONCAT>), blocks, PIPELINE_THREADS, SHARED, call.stream,
                    at.dy.as<const T>(), at.weights.as<const T>(), at.bias.as<const float>(), at.other.as<const T>(),
                    at.y.as<T>(), f);
}

}  // namespace mbc

extern "C" const char* mbc_conv_transpose_nonoverlapping(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ConvTransposeArguments>(call, [&](auto of) {
    run_conv_transpose<false, decltype(of)>(call, operands_of_conv_transpose_nonoverlapping(call));
  });
}
extern "C" const char* mbc_conv_transpose_bias_add_concat(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ConvTransposeArguments>(call, [&](auto of) {
    run_conv_transpose<true, decltype(of)>(call, operands_of_conv_transpose_bias_add_concat(call));
  });
}
