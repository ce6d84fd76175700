// Gradient of depthwise 3 x 3 filters at strides of 1 and 2.
//
// Bytes      image and gradient in, once each; nine sums a channel out, in `parts` (split-K) that `add_parts`
//            adds in order, in fp64.
// Tile       a thread keeps the nine sums of N channels (4 channels last, 1 channels first) and walks over its share of
//            the tiles; sums of a block are added tap by tap through shared memory, by halves.
// Threads    256, along channels and down the tiles.
// Registers  36 accumulators at four channels; launch bounds as in depthwise.cu.
// Limit      memory bandwidth and index arithmetic.
#include "depthwise.cuh"
#include "split_k.cuh"

namespace mbc {

// Channels of a thread, channels last, each with nine sums: registers have no room for more.
constexpr int DEPTHWISE_FILTER_VECTOR = 4;

// Part `blockIdx.y` of the filter gradient [filters, K, K] is written to its own place in `out` [parts, ...].
template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, Size::BLOCKS)
    depthwise_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ out, Depthwise g,
                     Steps steps, bool accumulate) {
  constexpr int N = Size::N, K = Size::K, S = Size::S;
  const int64_t k = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  float sum[K * K][N] = {};
  if (k < g.output.channels) {
    const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
    Walk at(steps, run.begin + threadIdx.y);
    for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
      const int32_t oy = static_cast<int32_t>(at.middle) * Size::HEIGHT;
      const int32_t ox = static_cast<int32_t>(at.inner) * Size::WIDTH;
      const T* plane = x + g.image.plane(at.outer, N > 1 ? k : k / g.depth_multiplier);
      const T* gradients = dy + g.output.plane(at.outer, k);
      float gradient[Size::HEIGHT][Size::WIDTH][N];
#pragma unroll
      for (int t = 0; t < Size::HEIGHT; ++t) fetch_line(gradient[t], gradients, g.output, oy + t, ox);
#pragma unroll
      for (int d = 0; d < Size::WINDOW_HEIGHT; ++d) {
        float line[Size::WINDOW_WIDTH][N];
        fetch_line(line, plane, g.image, oy * S - g.pad_top + d, ox * S - g.pad_left);
#pragma unroll
        for (int t = 0; t < Size::HEIGHT; ++t) {
          const int r = d - t * S;
          if (r < 0 || r >= K) continue;
#pragma unroll
          for (int s = 0; s < K; ++s)
#pragma unroll
            for (int b = 0; b < Size::WIDTH; ++b)
#pragma unroll
              for (int j = 0; j < N; ++j)
                sum[r * K + s][j] = fmaf(line[b * S + s][j], gradient[t][b][j], sum[r * K + s][j]);
        }
      }
    }
  }
  __shared__ Vec<float, N> shared[THREADS];
  const unsigned self = threadIdx.y * blockDim.x + threadIdx.x;
  float* to = out + static_cast<int64_t>(blockIdx.y) * g.output.channels * K * K + k * K * K;
#pragma unroll
  for (int tap = 0; tap < K * K; ++tap) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) shared[self].v[j] = sum[tap][j];
    for (unsigned count = blockDim.y; count > 1;) {
      const unsigned half = (count + 1) / 2;
      __syncthreads();
      if (threadIdx.y + half < count)
#pragma unroll
        for (int j = 0; j < N; ++j) shared[self].v[j] += shared[self + half * blockDim.x].v[j];
      count = half;
    }
    if (threadIdx.y == 0 && k < g.output.channels)
#pragma unroll
      for (int j = 0; j < N; ++j)
        to[j * K * K + tap] = shared[self].v[j] + (accumulate ? to[j * K * K + tap] : 0.0f);
  }
}

}  // namespace mbc

extern "C" const char* mbc_depthwise_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DepthwiseArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    return run_depthwise<DEPTHWISE_FILTER_VECTOR>(a, in<T>(call, 0), in<T>(call, 1), [&](auto size) {
      using Size = decltype(size);
      const DepthwiseGrid grid(a.layout, a.channels * a.depth_multiplier, Size::N);
      const Steps steps(divide_up(a.out_width, Size::WIDTH), divide_up(a.out_height, Size::HEIGHT), grid.block.y);
      const int64_t elements = a.channels * a.depth_multiplier * Size::K * Size::K;
      float* dw = out<float>(call, 2);
      float* target = a.parts > 1 ? out<float>(call, 3) : dw;
      MBC_LAUNCH((depthwise_filter<T, Size>), dim3(grid.columns, static_cast<unsigned>(a.parts)), grid.block,
                 call.stream, in<T>(call, 0), in<T>(call, 1), target, Depthwise(a), steps,
                 a.accumulate != 0 && a.parts == 1);
      if (a.parts > 1) add_parts(call.stream, target, dw, elements, a.parts, a.accumulate != 0);
    });
  });
  return launched();
}
