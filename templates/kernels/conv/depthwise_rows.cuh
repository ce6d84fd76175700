// Depthwise convolutions whose filters are wider or higher than 3 x 3, channels last, one filter for each channel, at
// strides of 1 and 2: forward and data gradient.
//
// Bytes      image in, result out, once each; overlapping windows are read from registers along x, from the L1 cache
//            along y.
// Tile       a thread computes HEIGHT x WIDTH output pixels of two neighbouring channels. It walks down the lines of
//            their window in a loop: a line is widened to fp32 while the next one is being loaded, and is multiplied by
//            those rows of the filter that it meets in each output row.
// Threads    256, along channels and down the tiles; blocks walk over tiles.
// Shared     the filters of the block's channels, transposed to [tap, channel].
// Registers  56 sums, two lines (one as stored, one in fp32) and a few taps; two blocks a multiprocessor.
// Limit      5 x 5 memory bandwidth; 7 x 7 fp32 arithmetic: about three instructions for two multiply-adds.
//
// At a stride of 1 the data gradient is the convolution of the gradient with the filter rotated by 180 degrees.
#pragma once

#include "depthwise.cuh"
#include "depthwise_rows_arguments.h"

namespace mbc {

constexpr int DEPTHWISE_PAIR = 2;    // channels of a thread
constexpr int DEPTHWISE_LINES = 11;  // most taps along one side of a filter of one row or column

// A compiled filter shape: its height is a run-time value of at most MOST_HEIGHT; its width is WIDTH, or any smaller
// width if the shape is not EXACT.
template <int WIDTH_, int MOST_HEIGHT_, bool EXACT_>
struct DepthwiseFilterRows {
  static constexpr int WIDTH = WIDTH_, MOST_HEIGHT = MOST_HEIGHT_;
  static constexpr bool EXACT = EXACT_;
};

// Operands of a launch: `from` and `to` are image and output, or in the data gradient output and image.
struct DepthwiseRows {
  Samples from, to;
  int64_t rows;
  int32_t pad_top, pad_left, kernel_height, kernel_width;
  bool turned;  // whether the filter is rotated by 180 degrees

  static DepthwiseRows forward(const DepthwiseRowsArguments& a) {
    return DepthwiseRows(a, image(a), output(a), a.pad_top, a.pad_left, false);
  }
  static DepthwiseRows data(const DepthwiseRowsArguments& a) {
    if (a.stride > 1) return DepthwiseRows(a, output(a), image(a), a.pad_top, a.pad_left, false);
    return DepthwiseRows(a, output(a), image(a), a.kernel_height - 1 - a.pad_top, a.kernel_width - 1 - a.pad_left, true);
  }

 private:
  DepthwiseRows(const DepthwiseRowsArguments& a, const Image& read, const Image& written, int64_t top, int64_t left,
                bool turn)
      : from(read), to(written), rows(a.rows), pad_top(static_cast<int32_t>(top)),
        pad_left(static_cast<int32_t>(left)), kernel_height(static_cast<int32_t>(a.kernel_height)),
        kernel_width(static_cast<int32_t>(a.kernel_width)), turned(turn) {}
  static Image image(const DepthwiseArguments& a) { return Image(a.layout, a.channels, a.height, a.width); }
  static Image output(const DepthwiseArguments& a) { return Image(a.layout, a.channels, a.out_height, a.out_width); }
};

// Keeps a value in its register: the compiler would compute it again in every line and in every branch that uses it.
__device__ inline void pin(float& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(value));
#endif
}
__device__ inline void pin(uint32_t& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
}

// Bit i: whether pixel x + i of a line is inside the image.
template <int COUNT>
__device__ inline uint32_t pixels_inside(int32_t x, int32_t width) {
  static_assert(COUNT < 32);
  const int32_t first = min(max(-x, 0), COUNT), end = min(max(width - x, 0), COUNT);
  return ((1u << end) - 1) & ~((1u << first) - 1);
}

// Neighbouring elements as stored, in whole registers: a 16-bit value that may stay zero costs one more instruction.
template <int BYTES>
struct Fetched {
  Stored<BYTES> stored;

  __device__ void load(const char* at) { stored = *reinterpret_cast<const Stored<BYTES>*>(at); }
  __device__ Stored<BYTES> get() const { return stored; }
};
template <>
struct Fetched<2> {
  uint32_t word;

  __device__ void load(const char* at) { word = *reinterpret_cast<const uint16_t*>(at); }
  __device__ Stored<2> get() const { return {{static_cast<uint16_t>(word)}}; }
};

// A line of `COUNT` pixels of N channels.
template <typename T, int N, int COUNT>
struct FetchedLine {
  Fetched<N * static_cast<int>(sizeof(T))> pixels[COUNT];

  // From (y, x) on, 0 outside the sample. `columns`: of `pixels_inside`, equal for all lines of a window. Addresses
  // grow from pixel to pixel: computing each from its index costs more instructions than all arithmetic.
  __device__ void fetch(const T* plane, const Samples& sample, int32_t y, int32_t x, uint32_t columns) {
    const uint32_t inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(sample.height) ? columns : 0;
    const char* at = reinterpret_cast<const char*>(plane + (y * sample.y_stride + x * sample.x_stride));
    const uint32_t step = static_cast<uint32_t>(sample.x_stride) * static_cast<uint32_t>(sizeof(T));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      pixels[i] = {};
      if (inside & 1u << i) pixels[i].load(at);
      at += step;
    }
  }
  __device__ void widen_to(float (&to)[COUNT][N]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) widen<N>(to[i], pixels[i].get(), T());
  }
};

template <int COUNT, int N>
__device__ inline void pin(float (&line)[COUNT][N]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) pin(line[i][j]);
}

// Stores those pixels of a tile from (y, x) on that are inside the image.
template <int HEIGHT, int WIDTH, int N, typename T>
__device__ inline void store_lines(const float (&tile)[HEIGHT][WIDTH][N], T* plane, const Samples& sample, int32_t y,
                                   int32_t x) {
  uint32_t columns = pixels_inside<WIDTH>(x, sample.width);
  pin(columns);
  const uint32_t step = static_cast<uint32_t>(sample.x_stride) * static_cast<uint32_t>(sizeof(T));
#pragma unroll
  for (int i = 0; i < HEIGHT; ++i) {
    const uint32_t inside = static_cast<uint32_t>(y + i) < static_cast<uint32_t>(sample.height) ? columns : 0;
    char* at = reinterpret_cast<char*>(plane + ((y + i) * sample.y_stride + x * sample.x_stride));
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      Vec<T, N> pixel;
#pragma unroll
      for (int j = 0; j < N; ++j) pixel.v[j] = from_float<T>(tile[i][k][j]);
      Stored<N * static_cast<int>(sizeof(T))> words;  // the compiler may store small elements of a vector one by one
      memcpy(&words, &pixel, sizeof words);
      if (inside & 1u << k) *reinterpret_cast<decltype(words)*>(at) = words;
      at += step;
    }
  }
}

// The filters [channels, height, width] of a block's channels.
template <typename Filter>
struct PairFilters {
  Vec<float, DEPTHWISE_PAIR> taps[Filter::MOST_HEIGHT * Filter::WIDTH * 32];

  // Every thread copies a share of the taps of its channels, from `c` on; ends with a barrier.
  template <typename T>
  __device__ void stage(const T* w, int64_t c, const DepthwiseRows& g) {
    const int size = g.kernel_height * g.kernel_width;
    const T* from = w + c * size;
    if (c < g.to.channels) {
      for (int i = threadIdx.y; i < size; i += blockDim.y) {
        const int tap = g.turned ? size - 1 - i : i, r = tap / g.kernel_width;
        Vec<float, DEPTHWISE_PAIR>& pair = taps[(r * Filter::WIDTH + tap - r * g.kernel_width) * 32 + threadIdx.x];
#pragma unroll
        for (int j = 0; j < DEPTHWISE_PAIR; ++j) pair.v[j] = to_float(from[j * size + i]);
      }
    }
    __syncthreads();
  }
  // Weights of this thread's channels, from the first tap of a row on; taps are 32 apart.
  __device__ const Vec<float, DEPTHWISE_PAIR>* row(int r) const { return taps + r * Filter::WIDTH * 32 + threadIdx.x; }
};

// The tile of a thread, in output pixels.
template <typename Filter_, int S_>
struct RowsForward {
  using Filter = Filter_;
  static constexpr int S = S_, N = DEPTHWISE_PAIR, WIDTH = S == 1 ? 7 : 4;
  static constexpr int HEIGHT = S == 1 && Filter::MOST_HEIGHT > 1 ? 4 : 2;  // lines share windows along y
  static constexpr int COUNT = (WIDTH - 1) * S + Filter::WIDTH;  // pixels of a line of its window
};

template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, 2)
    depthwise_rows(const T* __restrict__ x, const T* __restrict__ w, T* __restrict__ y, DepthwiseRows g, Steps steps) {
  using Filter = typename Size::Filter;
  constexpr int N = Size::N, S = Size::S, COUNT = Size::COUNT;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  __shared__ PairFilters<Filter> filters;
  filters.stage(w, c, g);
  if (c >= g.to.channels) return;
  const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
  Walk at(steps, run.begin + threadIdx.y);
  for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
    const int32_t oy = static_cast<int32_t>(at.middle) * Size::HEIGHT, ox = static_cast<int32_t>(at.inner) * Size::WIDTH;
    const int32_t top = oy * S - g.pad_top, left = ox * S - g.pad_left;
    const T* plane = x + g.from.plane(at.outer, c);
    uint32_t columns = pixels_inside<COUNT>(left, g.from.width);
    pin(columns);
    const int lines = (Size::HEIGHT - 1) * S + g.kernel_height;
    float sum[Size::HEIGHT][Size::WIDTH][N] = {};
    FetchedLine<T, N, COUNT> ahead;
    ahead.fetch(plane, g.from, top, left, columns);
#pragma unroll 1
    for (int d = 0; d < lines; ++d) {
      float line[COUNT][N];
      ahead.widen_to(line);
      pin(line);
      if (d + 1 < lines) ahead.fetch(plane, g.from, top + d + 1, left, columns);
#pragma unroll
      for (int t = 0; t < Size::HEIGHT; ++t) {
        const int r = d - t * S;
        if (static_cast<unsigned>(r) >= static_cast<unsigned>(g.kernel_height)) continue;
        const Vec<float, N>* taps = filters.row(r);
#pragma unroll
        for (int s = 0; s < Filter::WIDTH; ++s) {
          if (!Filter::EXACT && s >= g.kernel_width) break;
          const Vec<float, N> tap = taps[s * 32];
#pragma unroll
          for (int k = 0; k < Size::WIDTH; ++k)
#pragma unroll
            for (int j = 0; j < N; ++j) sum[t][k][j] = fmaf(line[k * S + s][j], tap.v[j], sum[t][k][j]);
        }
      }
    }
    store_lines(sum, y + g.to.plane(at.outer, c), g.to, oy, ox);
  }
}

// The data gradient at a stride of 2 is computed by tiles of image pixels, 2 x 2 for each of ACROSS positions of the
// stride.
template <typename Filter_>
struct RowsData {
  using Filter = Filter_;
  static constexpr int S = 2, N = DEPTHWISE_PAIR, ACROSS = 4;
  static constexpr int LAST = (Filter::WIDTH + S - 1) / S - 1;  // positions after its own that an output pixel reaches
  static constexpr int COUNT = ACROSS + LAST;
};

template <typename T, typename Size>
__global__ void __launch_bounds__(THREADS, 2)
    depthwise_rows_data(const T* __restrict__ dy, const T* __restrict__ w, T* __restrict__ dx, DepthwiseRows g,
                        Steps steps) {
  using Filter = typename Size::Filter;
  constexpr int N = Size::N, S = Size::S, COUNT = Size::COUNT, LAST = Size::LAST;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  __shared__ PairFilters<Filter> filters;
  filters.stage(w, c, g);
  if (c >= g.to.channels) return;
  const TileRun run(steps, g.rows, blockIdx.y, gridDim.y);
  Walk at(steps, run.begin + threadIdx.y);
  for (int64_t i = run.begin + threadIdx.y; i < run.end; i += blockDim.y, at.advance(steps)) {
    // The first positions are those that begin at or before the image's first pixels.
    const int32_t v = static_cast<int32_t>(at.middle) + g.pad_top / S;
    const int32_t u = static_cast<int32_t>(at.inner) * Size::ACROSS + g.pad_left / S;
    const T* plane = dy + g.from.plane(at.outer, c);
    uint32_t columns = pixels_inside<COUNT>(u - LAST, g.from.width);
    pin(columns);
    float sum[S][Size::ACROSS * S][N] = {};
    FetchedLine<T, N, COUNT> ahead;
    ahead.fetch(plane, g.from, v, u - LAST, columns);
    // Walks up the lines of the gradient, so that the rows of the filter come in order.
#pragma unroll 1
    for (int r = 0; r < g.kernel_height; r += S) {
      float line[COUNT][N];
      ahead.widen_to(line);
      pin(line);
      if (r + S < g.kernel_height) ahead.fetch(plane, g.from, v - r / S - 1, u - LAST, columns);
#pragma unroll
      for (int t = 0; t < S; ++t) {
        if (r + t >= g.kernel_height) continue;
        const Vec<float, N>* taps = filters.row(r + t);
#pragma unroll
        for (int s = 0; s < Filter::WIDTH; ++s) {
          if (!Filter::EXACT && s >= g.kernel_width) break;
          const Vec<float, N> tap = taps[s * 32];
#pragma unroll
          for (int k = s % S; k < Size::ACROSS * S; k += S)
#pragma unroll
            for (int j = 0; j < N; ++j) sum[t][k][j] = fmaf(line[LAST + (k - s) / S][j], tap.v[j], sum[t][k][j]);
        }
      }
    }
    store_lines(sum, dx + g.to.plane(at.outer, c), g.to, v * S - g.pad_top, u * S - g.pad_left);
  }
}

// At most two waves; one tile for each thread justifies a block.
inline dim3 rows_grid(const DepthwiseGrid& grid, int64_t tiles) {
  const int64_t wanted = divide_up(tiles, grid.block.y), most = divide_up(multiprocessors() * 4, grid.columns);
  return dim3(grid.columns, static_cast<unsigned>(wanted < most ? wanted : most));
}

template <typename T, typename Filter, int S>
void launch_depthwise_rows(const MbcCall& call, const DepthwiseArguments& a, const DepthwiseRows& g) {
  using Size = RowsForward<Filter, S>;
  const DepthwiseGrid grid(a.layout, a.channels, Size::N);
  const Steps steps(divide_up(g.to.width, Size::WIDTH), divide_up(g.to.height, Size::HEIGHT), grid.block.y);
  MBC_LAUNCH((depthwise_rows<T, Size>), rows_grid(grid, a.rows * steps.inner * steps.middle), grid.block, call.stream,
             in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), g, steps);
}

template <typename T, typename Filter>
void launch_depthwise_rows_data(const MbcCall& call, const DepthwiseArguments& a, const DepthwiseRows& g) {
  using Size = RowsData<Filter>;
  constexpr int S = Size::S;
  const DepthwiseGrid grid(a.layout, a.channels, Size::N);
  const Steps steps(divide_up(a.width + a.pad_left % S, Size::ACROSS * S), divide_up(a.height + a.pad_top % S, S),
                    grid.block.y);
  MBC_LAUNCH((depthwise_rows_data<T, Size>), rows_grid(grid, a.rows * steps.inner * steps.middle), grid.block, call.stream,
             in<T>(call, 0), in<T>(call, 1), out<T>(call, 2), g, steps);
}

// The convolution by filters of one compiled shape, or its data gradient (DATA).
template <typename Filter, bool DATA = false>
const char* run_depthwise_rows(const MbcCall& call) {
  if (const char* problem = unaligned(call)) return problem;
  const auto& a = arguments<DepthwiseRowsArguments>(call);
  const auto g = DATA ? DepthwiseRows::data(a) : DepthwiseRows::forward(a);
  MBC_FOR_TYPE(a.type, T, {
    if (a.stride == 1)
      launch_depthwise_rows<T, Filter, 1>(call, a, g);
    else if constexpr (DATA)
      launch_depthwise_rows_data<T, Filter>(call, a, g);
    else
      launch_depthwise_rows<T, Filter, 2>(call, a, g);
  });
  return launched();
}

}  // namespace mbc
