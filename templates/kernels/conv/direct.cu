// Convolutions of any stride, padding, dilation, number of groups, layout and element type, which cuDNN may refuse.
//
// GEMM       `tiled`: implicit GEMM over windows (tiled_gemm.cuh), M = output pixels, N = filters of a group, K = taps
//            * channels of a group; data: M = image pixels, N = channels, K = taps * filters; filter: M = filters, N =
//            taps * channels, K = output pixels. Otherwise a thread computes one output element (a block computes each
//            element of a filter gradient), which is faster if a group has few channels.
// Tile       64 x 64, K = 16, by 256 threads of 4 x 4 FMA accumulators each; 8,704 bytes of shared memory.
// Split-K    the filter pass, over `parts` blocks, whose results `add_parts` adds in order.
// Limit      FMA and address arithmetic: it exists so that every request has a kernel, not to be fast.
#include "conv_operands.cuh"
#include "images.cuh"
#include "split_k.cuh"
#include "tiled_gemm.cuh"
#include "direct_arguments.h"

namespace mbc {

struct Geometry {
  Image image, output;
  int64_t rows;
  bool last;
  int32_t group_channels, group_filters, kernel_height, kernel_width, stride_height, stride_width, pad_top, pad_left,
      dilation_height, dilation_width;

  explicit Geometry(const ConvolutionArguments& a)
      : image(a.layout, a.channels, a.height, a.width), output(a.layout, a.filters, a.out_height, a.out_width), rows(a.rows), last(a.layout == MBC_CHANNELS_LAST),
        group_channels(static_cast<int32_t>(a.channels / a.groups)),
        group_filters(static_cast<int32_t>(a.filters / a.groups)),
        kernel_height(static_cast<int32_t>(a.kernel_height)), kernel_width(static_cast<int32_t>(a.kernel_width)),
        stride_height(static_cast<int32_t>(a.stride_height)), stride_width(static_cast<int32_t>(a.stride_width)),
        pad_top(static_cast<int32_t>(a.pad_top)), pad_left(static_cast<int32_t>(a.pad_left)),
        dilation_height(static_cast<int32_t>(a.dilation_height)),
        dilation_width(static_cast<int32_t>(a.dilation_width)) {}

  __host__ __device__ int64_t taps() const { return static_cast<int64_t>(kernel_height) * kernel_width; }
  // Elements of one filter, [group_channels, kernel_height, kernel_width] or with the channels last.
  __host__ __device__ int64_t filter_size() const { return taps() * group_channels; }
  __host__ __device__ int64_t out_pixels() const { return rows * output.height * output.width; }

  // Pixel of the image under tap (r, s) of output pixel (y, x); false in the padding.
  __device__ bool under(int32_t y, int32_t x, int32_t r, int32_t s, int32_t& iy, int32_t& ix) const {
    iy = y * stride_height - pad_top + r * dilation_height;
    ix = x * stride_width - pad_left + s * dilation_width;
    return iy >= 0 && iy < image.height && ix >= 0 && ix < image.width;
  }
  // Output pixel whose tap (r, s) reads image pixel (y, x); false if there is none.
  __device__ bool over(int32_t y, int32_t x, int32_t r, int32_t s, int32_t& oy, int32_t& ox) const {
    const int32_t down = y + pad_top - r * dilation_height, across = x + pad_left - s * dilation_width;
    if (down < 0 || across < 0) return false;
    oy = down / stride_height;
    ox = across / stride_width;
    return oy * stride_height == down && ox * stride_width == across && oy < output.height && ox < output.width;
  }
};

// Sample, row and column of a pixel's flat index.
struct PixelIndex {
  int64_t n;
  int32_t y, x;
};
__device__ inline PixelIndex pixel_index(const Image& image, int64_t number) {
  const int64_t line = quotient(number, image.width), n = quotient(line, image.height);
  return {n, static_cast<int32_t>(line - n * image.height), static_cast<int32_t>(number - line * image.width)};
}

// A position in a filter: channel and tap, in the order in which the layout stores them.
struct Tap {
  int32_t c, r, s;
};
__device__ inline Tap tap(bool last, int64_t number, int32_t channels, int32_t height, int32_t width) {
  const uint32_t k = static_cast<uint32_t>(number), w = static_cast<uint32_t>(width);
  if (last) {
    const uint32_t position = k / static_cast<uint32_t>(channels), r = position / w;
    return {static_cast<int32_t>(k - position * channels), static_cast<int32_t>(r),
            static_cast<int32_t>(position - r * w)};
  }
  const uint32_t line = k / w, c = line / static_cast<uint32_t>(height);
  return {static_cast<int32_t>(c), static_cast<int32_t>(line - c * height), static_cast<int32_t>(k - line * w)};
}
__device__ inline int64_t tap_number(const Geometry& g, int32_t c, int32_t r, int32_t s) {
  return g.last ? (static_cast<int64_t>(r) * g.kernel_width + s) * g.group_channels + c
              : (static_cast<int64_t>(c) * g.kernel_height + r) * g.kernel_width + s;
}

// A of the forward pass. Rows: output pixels; K: channels and taps of the image.
template <typename T>
struct Windows {
  const T* x;
  Geometry g;

  struct Row {
    PixelIndex at;
    int64_t channel;
  };
  __device__ Row row(int64_t group, int64_t pixel) const { return {pixel_index(g.output, pixel), group * g.group_channels}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = tap(g.last, k, g.group_channels, g.kernel_height, g.kernel_width);
    int32_t y, x_;
    if (!g.under(row.at.y, row.at.x, t.r, t.s, y, x_)) return 0.0f;
    return to_float(x[g.image.at(row.at.n, row.channel + t.c, y, x_)]);
  }
};

// B of the forward pass. Rows: filters of a group; K: their elements in memory order.
template <typename T>
struct Filters {
  const T* w;
  Geometry g;

  using Row = const T*;
  __device__ Row row(int64_t group, int64_t k) const { return w + (group * g.group_filters + k) * g.filter_size(); }
  __device__ float at(Row row, int64_t k) const { return to_float(row[k]); }
};

template <typename T>
struct OutputPixels {
  T* y;
  Geometry g;

  __device__ void put(int64_t group, int64_t, int64_t m, int64_t n, float value) const {
    const PixelIndex at = pixel_index(g.output, m);
    y[g.output.at(at.n, group * g.group_filters + n, at.y, at.x)] = from_float<T>(value);
  }
};

// A of the data gradient. Rows: image pixels; K: filters and taps.
template <typename T>
struct GradientWindows {
  const T* dy;
  Geometry g;

  struct Row {
    PixelIndex at;
    int64_t filter;
  };
  __device__ Row row(int64_t group, int64_t pixel) const { return {pixel_index(g.image, pixel), group * g.group_filters}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = tap(g.last, k, g.group_filters, g.kernel_height, g.kernel_width);
    int32_t y, x;
    if (!g.over(row.at.y, row.at.x, t.r, t.s, y, x)) return 0.0f;
    return to_float(dy[g.output.at(row.at.n, row.filter + t.c, y, x)]);
  }
};

// B of the data gradient. Rows: channels of a group; K: filters and taps.
template <typename T>
struct FiltersByChannel {
  const T* w;
  Geometry g;

  struct Row {
    int64_t filter;
    int32_t channel;
  };
  __device__ Row row(int64_t group, int64_t c) const { return {group * g.group_filters, static_cast<int32_t>(c)}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = tap(g.last, k, g.group_filters, g.kernel_height, g.kernel_width);
    return to_float(w[(row.filter + t.c) * g.filter_size() + tap_number(g, row.channel, t.r, t.s)]);
  }
};

template <typename T>
struct ImagePixels {
  T* dx;
  Geometry g;

  __device__ void put(int64_t group, int64_t, int64_t m, int64_t n, float value) const {
    const PixelIndex at = pixel_index(g.image, m);
    dx[g.image.at(at.n, group * g.group_channels + n, at.y, at.x)] = from_float<T>(value);
  }
};

// A of the filter gradient. Rows: filters of a group; K: output pixels.
template <typename T>
struct Gradients {
  const T* dy;
  Geometry g;

  using Row = int64_t;
  __device__ Row row(int64_t group, int64_t k) const { return group * g.group_filters + k; }
  __device__ float at(Row filter, int64_t pixel) const {
    const PixelIndex at = pixel_index(g.output, pixel);
    return to_float(dy[g.output.at(at.n, filter, at.y, at.x)]);
  }
};

// B of the filter gradient. Rows: elements of a filter; K: output pixels.
template <typename T>
struct WindowsByTap {
  const T* x;
  Geometry g;

  struct Row {
    Tap tap;
    int64_t channel;
  };
  __device__ Row row(int64_t group, int64_t k) const {
    const Tap t = tap(g.last, k, g.group_channels, g.kernel_height, g.kernel_width);
    return {t, group * g.group_channels + t.c};
  }
  __device__ float at(const Row& row, int64_t pixel) const {
    const PixelIndex at = pixel_index(g.output, pixel);
    int32_t y, x_;
    if (!g.under(at.y, at.x, row.tap.r, row.tap.s, y, x_)) return 0.0f;
    return to_float(x[g.image.at(at.n, row.channel, y, x_)]);
  }
};

// The filter gradient, or one part of it in the workspace [parts, filters, filter_size].
struct FilterOut {
  float* dw;
  int64_t filter_size, group_filters, elements;
  bool accumulate;

  __device__ void put(int64_t group, int64_t part, int64_t m, int64_t n, float value) const {
    float* at = dw + part * elements + (group * group_filters + m) * filter_size + n;
    *at = accumulate ? *at + value : value;
  }
};

template <typename T>
struct DirectForward {
  const T *x, *w;
  T* y;
  Geometry g;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t channel = p.c / g.group_filters * g.group_channels;
    const T* filter = w + p.c * g.filter_size();
    float sum = 0.0f;
    for (int32_t c = 0; c < g.group_channels; ++c)
      for (int32_t r = 0; r < g.kernel_height; ++r)
        for (int32_t s = 0; s < g.kernel_width; ++s) {
          int32_t iy, ix;
          if (g.under(p.y, p.x, r, s, iy, ix))
            sum = fmaf(to_float(x[g.image.at(p.n, channel + c, iy, ix)]),
                       to_float(filter[tap_number(g, c, r, s)]), sum);
        }
    y[at] = from_float<T>(sum);
  }
};

template <typename T>
struct DirectData {
  const T *dy, *w;
  T* dx;
  Geometry g;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t group = p.c / g.group_channels;
    const int32_t c = static_cast<int32_t>(p.c - group * g.group_channels);
    float sum = 0.0f;
    for (int32_t r = 0; r < g.kernel_height; ++r)
      for (int32_t s = 0; s < g.kernel_width; ++s) {
        int32_t oy, ox;
        if (!g.over(p.y, p.x, r, s, oy, ox)) continue;
        for (int32_t k = 0; k < g.group_filters; ++k) {
          const int64_t filter = group * g.group_filters + k;
          sum = fmaf(to_float(dy[g.output.at(p.n, filter, oy, ox)]),
                     to_float(w[filter * g.filter_size() + tap_number(g, c, r, s)]), sum);
        }
      }
    dx[at] = from_float<T>(sum);
  }
};

// A block computes one element of every filter: threads x over filters (channels last) and y over output pixels.
template <typename T>
__global__ void direct_filter(const T* x, const T* dy, FilterOut out, Geometry g, int64_t filters, int64_t parts,
                              Steps steps) {
  __shared__ float shared[THREADS];
  const int64_t filter = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, part = blockIdx.z;
  const Tap t = tap(g.last, blockIdx.y, g.group_channels, g.kernel_height, g.kernel_width);
  const int64_t pixels = g.out_pixels();
  const int64_t begin = pixels / parts * part + min(part, pixels % parts);
  const int64_t end = begin + pixels / parts + (part < pixels % parts ? 1 : 0);
  float sum = 0.0f;
  if (filter < filters) {
    const int64_t channel = filter / g.group_filters * g.group_channels + t.c;
    Walk at(steps, begin + threadIdx.y);
    for (int64_t i = begin + threadIdx.y; i < end; i += blockDim.y, at.advance(steps)) {
      const int32_t y = static_cast<int32_t>(at.middle), x_ = static_cast<int32_t>(at.inner);
      int32_t iy, ix;
      if (g.under(y, x_, t.r, t.s, iy, ix))
        sum = fmaf(to_float(x[g.image.at(at.outer, channel, iy, ix)]),
                   to_float(dy[g.output.at(at.outer, filter, y, x_)]), sum);
    }
  }
  const unsigned self = threadIdx.y * blockDim.x + threadIdx.x;
  shared[self] = sum;
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) shared[self] += shared[self + half * blockDim.x];
  }
  if (threadIdx.y == 0 && filter < filters) out.put(0, part, filter, blockIdx.y, shared[self]);
}

template <typename T>
void run_forward(const MbcCall& call, const ConvolutionArguments& a, const Geometry& g) {
  const T *x = in<T>(call, 0), *w = in<T>(call, 1);
  T* y = out<T>(call, 2);
  if (a.tiled)
    run_tiled_gemm(call.stream, Windows<T>{x, g}, Filters<T>{w, g}, OutputPixels<T>{y, g}, g.out_pixels(),
                g.group_filters, g.filter_size(), a.groups, 1);
  else
    for_each_pixel<1>(call.stream, a.layout, a.rows, g.output, false, DirectForward<T>{x, w, y, g});
}

template <typename T>
void run_data(const MbcCall& call, const ConvolutionArguments& a, const Geometry& g) {
  const T *dy = in<T>(call, 0), *w = in<T>(call, 1);
  T* dx = out<T>(call, 2);
  if (a.tiled)
    run_tiled_gemm(call.stream, GradientWindows<T>{dy, g}, FiltersByChannel<T>{w, g}, ImagePixels<T>{dx, g},
                a.rows * a.height * a.width, g.group_channels, g.taps() * g.group_filters, a.groups, 1);
  else
    for_each_pixel<1>(call.stream, a.layout, a.rows, g.image, false, DirectData<T>{dy, w, dx, g});
}

template <typename T>
void run_filter(const MbcCall& call, const ConvolutionArguments& a, const Geometry& g) {
  const T *x = in<T>(call, 0), *dy = in<T>(call, 1);
  float* dw = out<float>(call, 2);
  const int64_t elements = a.filters * g.filter_size();
  float* target = a.parts > 1 ? out<float>(call, 3) : dw;
  const FilterOut result{target, g.filter_size(), g.group_filters, elements, a.accumulate && a.parts == 1};
  if (a.tiled) {
    run_tiled_gemm(call.stream, Gradients<T>{dy, g}, WindowsByTap<T>{x, g}, result, g.group_filters,
                g.filter_size(), g.out_pixels(), a.groups, a.parts);
  } else {
    const Tiling tiling(g.last ? a.filters : 1);
    const dim3 grid(static_cast<unsigned>(divide_up(a.filters, tiling.threads_x)), static_cast<unsigned>(g.filter_size()),
                    static_cast<unsigned>(a.parts));
    MBC_LAUNCH((direct_filter<T>), grid, dim3(tiling.threads_x, tiling.threads_y()), call.stream, x, dy, result, g,
               a.filters, a.parts, Steps(g.output.width, g.output.height, tiling.threads_y()));
  }
  if (a.parts > 1)
    MBC_LAUNCH(add_parts, blocks_for(elements), THREADS, call.stream, target, dw, elements, a.parts,
               a.accumulate != 0);
}

}  // namespace mbc

extern "C" const char* mbc_convolution(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConvolutionArguments>(call);
  const Geometry g(a);
  MBC_FOR_TYPE(a.type, T, {
    run_forward<T>(call, a, g);
  });
  return launched();
}

extern "C" const char* mbc_convolution_backward_data(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConvolutionArguments>(call);
  const Geometry g(a);
  MBC_FOR_TYPE(a.type, T, {
    run_data<T>(call, a, g);
  });
  return launched();
}

extern "C" const char* mbc_convolution_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConvolutionArguments>(call);
  const Geometry g(a);
  MBC_FOR_TYPE(a.type, T, {
    run_filter<T>(call, a, g);
  });
  return launched();
}
