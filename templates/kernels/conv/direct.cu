// Convolutions of any stride, padding, dilation, number of groups, layout and element type along one to three axes, which
// cuDNN may refuse. A volume is an image whose planes lie one below the other: only the axis of its lines differs.
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

struct Axis {
  int32_t size, output, kernel, stride, pad, dilation;

  Axis(int64_t size_, int64_t output_, int64_t kernel_, int64_t stride_, int64_t pad_, int64_t dilation_)
      : size(narrow(size_)), output(narrow(output_)), kernel(narrow(kernel_)), stride(narrow(stride_)), pad(narrow(pad_)),
        dilation(narrow(dilation_)) {}

  // Pixel under tap k of output o; false in the padding.
  __device__ bool under(int32_t o, int32_t k, int32_t& pixel) const {
    pixel = o * stride - pad + k * dilation;
    return pixel >= 0 && pixel < size;
  }
  // Output whose tap k reads a pixel; false if there is none.
  __device__ bool over(int32_t pixel, int32_t k, int32_t& o) const {
    const int32_t reach = pixel + pad - k * dilation;
    if (reach < 0) return false;
    o = reach / stride;
    return o * stride == reach && o < output;
  }
};

// The lines of an image.
struct Rows : Axis {
  explicit Rows(const ConvolutionArguments& a)
      : Axis(a.height, a.out_height, a.kernel_height, a.stride_height, a.pad_top, a.dilation_height) {}
};

// The lines of a volume, plane after plane, as one axis.
struct PlanesOfRows {
  Axis planes;
  Rows rows;
  int32_t kernel;

  explicit PlanesOfRows(const ConvolutionArguments& a)
      : planes(a.depth, a.out_depth, a.kernel_depth, a.stride_depth, a.pad_front, a.dilation_depth), rows(a),
        kernel(planes.kernel * rows.kernel) {}

  __device__ bool under(int32_t o, int32_t k, int32_t& pixel) const {
    const int32_t z = o / rows.output, q = k / rows.kernel;
    int32_t plane, row;
    const bool there = planes.under(z, q, plane) && rows.under(o - z * rows.output, k - q * rows.kernel, row);
    if (there) pixel = plane * rows.size + row;
    return there;
  }
  __device__ bool over(int32_t pixel, int32_t k, int32_t& o) const {
    const int32_t z = pixel / rows.size, q = k / rows.kernel;
    int32_t plane, row;
    const bool there = planes.over(z, q, plane) && rows.over(pixel - z * rows.size, k - q * rows.kernel, row);
    if (there) o = plane * rows.output + row;
    return there;
  }
};

// A position in a filter: channel and tap.
struct Tap {
  int32_t c, r, s;
};

template <typename Lines>
struct Geometry {
  Image image, output;
  int64_t rows;
  bool last;
  int32_t group_channels, group_filters;
  Lines lines;
  Axis columns;

  explicit Geometry(const ConvolutionArguments& a)
      : image(a.layout, a.channels, a.depth * a.height, a.width),
        output(a.layout, a.filters, a.out_depth * a.out_height, a.out_width), rows(a.rows),
        last(a.layout == MBC_CHANNELS_LAST),
        group_channels(narrow(a.channels / a.groups)), group_filters(narrow(a.filters / a.groups)), lines(a),
        columns(a.width, a.out_width, a.kernel_width, a.stride_width, a.pad_left, a.dilation_width) {}

  __host__ __device__ int64_t taps() const { return static_cast<int64_t>(lines.kernel) * columns.kernel; }
  // Elements of one filter, [group_channels, taps] or with the channels last.
  __host__ __device__ int64_t filter_size() const { return taps() * group_channels; }
  __host__ __device__ int64_t out_pixels() const { return rows * output.height * output.width; }

  // Pixel of the image under tap (r, s) of output pixel (y, x); false in the padding.
  __device__ bool under(int32_t y, int32_t x, int32_t r, int32_t s, int32_t& iy, int32_t& ix) const {
    const bool down = lines.under(y, r, iy), across = columns.under(x, s, ix);  // a branch would take registers
    return down && across;
  }
  // Output pixel whose tap (r, s) reads image pixel (y, x); false if there is none.
  __device__ bool over(int32_t y, int32_t x, int32_t r, int32_t s, int32_t& oy, int32_t& ox) const {
    return lines.over(y, r, oy) && columns.over(x, s, ox);
  }
  // The tap of a number, in the order in which the layout stores `channels` channels and their taps.
  __device__ Tap tap(int64_t number, int32_t channels) const {
    const uint32_t k = static_cast<uint32_t>(number), w = static_cast<uint32_t>(columns.kernel);
    if (last) {
      const uint32_t position = k / static_cast<uint32_t>(channels), r = position / w;
      return {static_cast<int32_t>(k - position * channels), static_cast<int32_t>(r),
              static_cast<int32_t>(position - r * w)};
    }
    const uint32_t line = k / w, c = line / static_cast<uint32_t>(lines.kernel);
    return {static_cast<int32_t>(c), static_cast<int32_t>(line - c * lines.kernel), static_cast<int32_t>(k - line * w)};
  }
  // The number of a tap in its filter.
  __device__ int64_t number(int32_t c, int32_t r, int32_t s) const {
    return last ? (static_cast<int64_t>(r) * columns.kernel + s) * group_channels + c
                : (static_cast<int64_t>(c) * lines.kernel + r) * columns.kernel + s;
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

// A of the forward pass. Rows: output pixels; K: channels and taps of the image.
template <typename T, typename G>
struct Windows {
  const T* x;
  G g;

  struct Row {
    PixelIndex at;
    int64_t channel;
  };
  __device__ Row row(int64_t group, int64_t pixel) const { return {pixel_index(g.output, pixel), group * g.group_channels}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = g.tap(k, g.group_channels);
    int32_t y, x_;
    if (!g.under(row.at.y, row.at.x, t.r, t.s, y, x_)) return 0.0f;
    return to_float(x[g.image.at(row.at.n, row.channel + t.c, y, x_)]);
  }
};

// B of the forward pass. Rows: filters of a group; K: their elements in memory order.
template <typename T, typename G>
struct Filters {
  const T* w;
  G g;

  using Row = const T*;
  __device__ Row row(int64_t group, int64_t k) const { return w + (group * g.group_filters + k) * g.filter_size(); }
  __device__ float at(Row row, int64_t k) const { return to_float(row[k]); }
};

// Result of the forward pass and of the data gradient: pixels of an image, of a group's channels.
template <typename T>
struct Pixels {
  T* to;
  Image image;
  int64_t group_channels;

  __device__ void put(int64_t group, int64_t, int64_t m, int64_t n, float value) const {
    const PixelIndex at = pixel_index(image, m);
    to[image.at(at.n, group * group_channels + n, at.y, at.x)] = from_float<T>(value);
  }
};

// A of the data gradient. Rows: image pixels; K: filters and taps.
template <typename T, typename G>
struct GradientWindows {
  const T* dy;
  G g;

  struct Row {
    PixelIndex at;
    int64_t filter;
  };
  __device__ Row row(int64_t group, int64_t pixel) const { return {pixel_index(g.image, pixel), group * g.group_filters}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = g.tap(k, g.group_filters);
    int32_t y, x;
    if (!g.over(row.at.y, row.at.x, t.r, t.s, y, x)) return 0.0f;
    return to_float(dy[g.output.at(row.at.n, row.filter + t.c, y, x)]);
  }
};

// B of the data gradient. Rows: channels of a group; K: filters and taps.
template <typename T, typename G>
struct FiltersByChannel {
  const T* w;
  G g;

  struct Row {
    int64_t filter;
    int32_t channel;
  };
  __device__ Row row(int64_t group, int64_t c) const { return {group * g.group_filters, static_cast<int32_t>(c)}; }
  __device__ float at(const Row& row, int64_t k) const {
    const Tap t = g.tap(k, g.group_filters);
    return to_float(w[(row.filter + t.c) * g.filter_size() + g.number(row.channel, t.r, t.s)]);
  }
};

// A of the filter gradient. Rows: filters of a group; K: output pixels.
template <typename T, typename G>
struct Gradients {
  const T* dy;
  G g;

  using Row = int64_t;
  __device__ Row row(int64_t group, int64_t k) const { return group * g.group_filters + k; }
  __device__ float at(Row filter, int64_t pixel) const {
    const PixelIndex at = pixel_index(g.output, pixel);
    return to_float(dy[g.output.at(at.n, filter, at.y, at.x)]);
  }
};

// B of the filter gradient. Rows: elements of a filter; K: output pixels.
template <typename T, typename G>
struct WindowsByTap {
  const T* x;
  G g;

  struct Row {
    Tap tap;
    int64_t channel;
  };
  __device__ Row row(int64_t group, int64_t k) const {
    const Tap t = g.tap(k, g.group_channels);
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

template <typename T, typename G>
struct DirectForward {
  const T *x, *w;
  T* y;
  G g;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t channel = p.c / g.group_filters * g.group_channels;
    const T* filter = w + p.c * g.filter_size();
    float sum = 0.0f;
    for (int32_t c = 0; c < g.group_channels; ++c)
      for (int32_t r = 0; r < g.lines.kernel; ++r)
        for (int32_t s = 0; s < g.columns.kernel; ++s) {
          int32_t iy, ix;
          if (g.under(p.y, p.x, r, s, iy, ix))
            sum = fmaf(to_float(x[g.image.at(p.n, channel + c, iy, ix)]),
                       to_float(filter[g.number(c, r, s)]), sum);
        }
    y[at] = from_float<T>(sum);
  }
};

template <typename T, typename G>
struct DirectData {
  const T *dy, *w;
  T* dx;
  G g;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t group = p.c / g.group_channels;
    const int32_t c = static_cast<int32_t>(p.c - group * g.group_channels);
    float sum = 0.0f;
    for (int32_t r = 0; r < g.lines.kernel; ++r)
      for (int32_t s = 0; s < g.columns.kernel; ++s) {
        int32_t oy, ox;
        if (!g.over(p.y, p.x, r, s, oy, ox)) continue;
        for (int32_t k = 0; k < g.group_filters; ++k) {
          const int64_t filter = group * g.group_filters + k;
          sum = fmaf(to_float(dy[g.output.at(p.n, filter, oy, ox)]),
                     to_float(w[filter * g.filter_size() + g.number(c, r, s)]), sum);
        }
      }
    dx[at] = from_float<T>(sum);
  }
};

// A block computes one element of every filter: threads x over filters (channels last) and y over output pixels.
template <typename T, typename G>
__global__ void direct_filter(const T* x, const T* dy, FilterOut out, G g, int64_t filters, int64_t parts,
                              Steps steps) {
  __shared__ float shared[THREADS];
  const int64_t filter = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, part = blockIdx.z;
  const Tap t = g.tap(blockIdx.y, g.group_channels);
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

template <typename T, typename G>
void run_forward(const MbcCall& call, const ConvolutionArguments& a, const G& g) {
  const T *x = in<T>(call, 0), *w = in<T>(call, 1);
  T* y = out<T>(call, 2);
  if (a.tiled)
    run_tiled_gemm(call.stream, Windows<T, G>{x, g}, Filters<T, G>{w, g}, Pixels<T>{y, g.output, g.group_filters},
                g.out_pixels(), g.group_filters, g.filter_size(), a.groups, 1);
  else
    for_each_pixel<1>(call.stream, a.layout, a.rows, g.output, false, DirectForward<T, G>{x, w, y, g});
}

template <typename T, typename G>
void run_data(const MbcCall& call, const ConvolutionArguments& a, const G& g) {
  const T *dy = in<T>(call, 0), *w = in<T>(call, 1);
  T* dx = out<T>(call, 2);
  if (a.tiled)
    run_tiled_gemm(call.stream, GradientWindows<T, G>{dy, g}, FiltersByChannel<T, G>{w, g},
                Pixels<T>{dx, g.image, g.group_channels}, a.rows * g.image.height * g.image.width, g.group_channels,
                g.taps() * g.group_filters, a.groups, 1);
  else
    for_each_pixel<1>(call.stream, a.layout, a.rows, g.image, false, DirectData<T, G>{dy, w, dx, g});
}

template <typename T, typename G>
void run_filter(const MbcCall& call, const ConvolutionArguments& a, const G& g) {
  const T *x = in<T>(call, 0), *dy = in<T>(call, 1);
  float* dw = out<float>(call, 2);
  const int64_t elements = a.filters * g.filter_size();
  float* target = a.parts > 1 ? out<float>(call, 3) : dw;
  const FilterOut result{target, g.filter_size(), g.group_filters, elements, a.accumulate && a.parts == 1};
  if (a.tiled) {
    run_tiled_gemm(call.stream, Gradients<T, G>{dy, g}, WindowsByTap<T, G>{x, g}, result, g.group_filters,
                g.filter_size(), g.out_pixels(), a.groups, a.parts);
  } else {
    const Tiling tiling(g.last ? a.filters : 1);
    const dim3 grid(static_cast<unsigned>(divide_up(a.filters, tiling.threads_x)), static_cast<unsigned>(g.filter_size()),
                    static_cast<unsigned>(a.parts));
    MBC_LAUNCH((direct_filter<T, G>), grid, dim3(tiling.threads_x, tiling.threads_y()), call.stream, x, dy, result, g,
               a.filters, a.parts, Steps(g.output.width, g.output.height, tiling.threads_y()));
  }
  if (a.parts > 1) add_parts(call.stream, target, dw, elements, a.parts, a.accumulate != 0);
}

// Calls `run` with an element and with the geometry of the call.
template <typename Run>
const char* for_geometry(const MbcCall& call, Run run) {
  const auto& a = arguments<ConvolutionArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    if (a.volume)
      run(T{}, a, Geometry<PlanesOfRows>(a));
    else
      run(T{}, a, Geometry<Rows>(a));
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_convolution(const MbcCall& call) {
  return mbc::for_geometry(call, [&](auto x, const auto& a, const auto& g) { mbc::run_forward<decltype(x)>(call, a, g); });
}
extern "C" const char* mbc_convolution_backward_data(const MbcCall& call) {
  return mbc::for_geometry(call, [&](auto x, const auto& a, const auto& g) { mbc::run_data<decltype(x)>(call, a, g); });
}
extern "C" const char* mbc_convolution_backward_filter(const MbcCall& call) {
  return mbc::for_geometry(call, [&](auto x, const auto& a, const auto& g) { mbc::run_filter<decltype(x)>(call, a, g); });
}
