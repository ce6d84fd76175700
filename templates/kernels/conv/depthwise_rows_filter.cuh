// Gradient of depthwise filters wider or higher than 3 x 3, channels last, one filter for each channel, at strides of 1
// and 2.
//
// Bytes      image and gradient in, once each; a sum for every tap out, in `parts` (split-K) that `add_parts` adds in
//            order, in fp64.
// Tile       a thread keeps all sums of its one or two channels. For each of its tiles it holds HEIGHT x WIDTH pixels
//            of the gradient and walks down the lines of their window, each read and widened once.
// Threads    128, along channels and down the tiles: three blocks use more registers than 1.5 of 256 threads.
// Shared     sums of a block's threads, some taps at a time, which are added in the order of threads.
// Registers  49 sums of one channel for 7 x 7, 50 of two for 5 x 5, at most as many pixels of the gradient, and lines
//            in flight; three blocks on a multiprocessor.
// Limit      5 x 5 memory bandwidth; 7 x 7 fp32 arithmetic: about three instructions for two multiply-adds.
#pragma once

#include "depthwise_rows.cuh"
#include "split_k.cuh"

namespace mbc {

constexpr int DEPTHWISE_FILTER_THREADS = 128;  // threads of a block

// Constants of an instantiation: channels of a thread, stride, filter (an actual filter may be smaller, and leaves sums
// unused), and the tile of a thread in output pixels.
template <int N_, int S_, int KERNEL_HEIGHT_, int KERNEL_WIDTH_, int HEIGHT_, int WIDTH_>
struct RowsFilter {
  static constexpr int N = N_, S = S_, KERNEL_HEIGHT = KERNEL_HEIGHT_, KERNEL_WIDTH = KERNEL_WIDTH_;
  static constexpr int HEIGHT = HEIGHT_, WIDTH = WIDTH_, TAPS = KERNEL_HEIGHT * KERNEL_WIDTH;
  static constexpr int LINES = (HEIGHT - 1) * S + KERNEL_HEIGHT, COUNT = (WIDTH - 1) * S + KERNEL_WIDTH;
  // Taps that are added together.
  static constexpr int TOGETHER = KERNEL_HEIGHT == 1 ? KERNEL_WIDTH : KERNEL_HEIGHT;
};

// Part `blockIdx.y` of the filter gradient [channels, height, width] is written to its own place in `out` [parts, ...].
template <typename T, typename Size>
__global__ void __launch_bounds__(DEPTHWISE_FILTER_THREADS, 3)
    depthwise_rows_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ out, DepthwiseRows g,
                          Steps steps, bool accumulate) {
  constexpr int N = Size::N, S = Size::S, COUNT = Size::COUNT;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * N, c = first + threadIdx.x * N;
  float sum[Size::TAPS][N] = {};
  if (c < g.to.channels) {
    const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
    Walk at(steps, run.begin + threadIdx.y);
    for (int64_t left = run.end - run.begin - threadIdx.y; left > 0; left -= blockDim.y, at.advance(steps)) {
      const int32_t oy = static_cast<int32_t>(at.middle) * Size::HEIGHT;
      const int32_t ox = static_cast<int32_t>(at.inner) * Size::WIDTH;
      const T* plane = x + g.from.plane(at.outer, c);
      const T* gradients = dy + g.to.plane(at.outer, c);
      float gradient[Size::HEIGHT][Size::WIDTH][N];
#pragma unroll
      for (int t = 0; t < Size::HEIGHT; ++t) {
        FetchedLine<T, N, Size::WIDTH> stored;
        stored.fetch(gradients, g.to, oy + t, ox, pixels_inside<Size::WIDTH>(ox, g.to.width));
        stored.widen_to(gradient[t]);
      }
      const int32_t top = oy * S - g.pad_top, side = ox * S - g.pad_left;
      const uint32_t columns = pixels_inside<COUNT>(side, g.from.width);
#pragma unroll
      for (int d = 0; d < Size::LINES; ++d) {
        float line[COUNT][N];
        FetchedLine<T, N, COUNT> stored;
        stored.fetch(plane, g.from, top + d, side, columns);
        stored.widen_to(line);
#pragma unroll
        for (int t = 0; t < Size::HEIGHT; ++t) {
          const int r = d - t * S;
          if (r < 0 || r >= Size::KERNEL_HEIGHT) continue;
#pragma unroll
          for (int s = 0; s < Size::KERNEL_WIDTH; ++s)
#pragma unroll
            for (int k = 0; k < Size::WIDTH; ++k)
#pragma unroll
              for (int j = 0; j < N; ++j) {
                float& tap = sum[r * Size::KERNEL_WIDTH + s][j];
                tap = fmaf(line[k * S + s][j], gradient[t][k][j], tap);
              }
        }
      }
    }
  }
  constexpr int TOGETHER = Size::TOGETHER;
  __shared__ Vec<float, N> shared[TOGETHER][DEPTHWISE_FILTER_THREADS];
  const int threads_x = static_cast<int>(blockDim.x), threads = threads_x * static_cast<int>(blockDim.y);
  const int self = static_cast<int>(threadIdx.y) * threads_x + static_cast<int>(threadIdx.x);
  const int64_t elements = static_cast<int64_t>(g.kernel_height) * g.kernel_width;
  float* to = out + (static_cast<int64_t>(blockIdx.y) * g.to.channels + first) * elements;
#pragma unroll
  for (int begin = 0; begin < Size::TAPS; begin += TOGETHER) {
    __syncthreads();
#pragma unroll
    for (int tap = 0; tap < TOGETHER; ++tap)
#pragma unroll
      for (int j = 0; j < N; ++j) shared[tap][self].v[j] = sum[begin + tap][j];
    __syncthreads();
    for (int i = self; i < TOGETHER * threads_x; i += threads) {
      const int tap = i / threads_x, lane = i - tap * threads_x;
      const int r = (begin + tap) / Size::KERNEL_WIDTH, s = (begin + tap) % Size::KERNEL_WIDTH;
      if (r >= g.kernel_height || s >= g.kernel_width || first + lane * N >= g.to.channels) continue;
      Vec<float, N> total = shared[tap][lane];
      for (int other = lane + threads_x; other < threads; other += threads_x)
#pragma unroll
        for (int j = 0; j < N; ++j) total.v[j] += shared[tap][other].v[j];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float* element = to + (lane * N + j) * elements + r * g.kernel_width + s;
        *element = total.v[j] + (accumulate ? *element : 0.0f);
      }
    }
  }
}

template <typename T, typename Size>
void launch_depthwise_rows_filter(const MbcCall& call) {
  const auto& a = arguments<DepthwiseRowsArguments>(call);
  DepthwiseGrid grid(a.layout, a.channels, Size::N);
  grid.block.y = DEPTHWISE_FILTER_THREADS / grid.block.x;
  const Steps steps(divide_up(a.out_width, Size::WIDTH), divide_up(a.out_height, Size::HEIGHT), grid.block.y);
  const int64_t elements = a.channels * a.kernel_height * a.kernel_width;
  float* dw = out<float>(call, 2);
  float* target = a.parts > 1 ? out<float>(call, 3) : dw;
  MBC_LAUNCH((depthwise_rows_filter<T, Size>), dim3(grid.columns, static_cast<unsigned>(a.parts)), grid.block,
             call.stream, in<T>(call, 0), in<T>(call, 1), target, DepthwiseRows::forward(a), steps,
             a.accumulate != 0 && a.parts == 1);
  if (a.parts > 1) add_parts(call.stream, target, dw, elements, a.parts, a.accumulate != 0);
}

// The filter gradient by sizes at strides of 1 and of 2.
template <typename Size, typename Strided>
const char* run_depthwise_rows_filter(const MbcCall& call) {
  if (const char* problem = unaligned(call)) return problem;
  const auto& a = arguments<DepthwiseRowsArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    if (a.stride == 1)
      launch_depthwise_rows_filter<T, Size>(call);
    else
      launch_depthwise_rows_filter<T, Strided>(call);
  });
  return launched();
}

}  // namespace mbc
