// Images in another size, nearest or bilinear, and the gradient, which gathers: every pixel of the input adds the
// gradients of those output pixels that read it, so that no two threads write one element and the order of additions is
// fixed.
//
// Bytes      the input once, the result once; repeated reads of a pixel come from the cache.
// Threads    256 in a grid-stride loop over the elements that are written: with channels last 16 bytes of channels of a
//            pixel each, with channels first one element (images.cuh).
// Limit      memory bandwidth; with channels first index arithmetic.
#include "images.cuh"
#include "pooling_arguments.h"

namespace mbc {

// The two pixels of the input around a position of the output, and the share of the second.
struct ResizeTap {
  int64_t first, second;
  float share;

  __device__ int64_t at(int i) const { return i == 0 ? first : second; }
  __device__ float weight(int i) const { return i == 0 ? 1.0f - share : share; }
  // The weight of pixel i of the input at this position.
  __device__ float weight_of(int64_t i) const {
    return (first == i ? 1.0f - share : 0.0f) + (second == i ? share : 0.0f);
  }
};

// One axis. Positions are whole numbers of units of 1 / (2 * output) pixels of the input.
struct Resampling {
  int64_t size, output;
  bool bilinear;

  __device__ ResizeTap tap(int64_t position) const {
    if (!bilinear) {
      const int64_t nearest = quotient(position * size, output);
      return {nearest, nearest, 0.0f};
    }
    const int64_t unit = 2 * output, at = max((2 * position + 1) * size - output, int64_t{0});
    const int64_t first = quotient(at, unit);
    return {first, min(first + 1, size - 1), static_cast<float>(at - first * unit) / static_cast<float>(unit)};
  }
  // Positions of the output that may read pixel i of the input: from the first one up to before the last.
  __device__ int64_t first(int64_t i) const {
    if (!bilinear) return quotient(i * output + size - 1, size);
    return quotient(max(output * (2 * i - 1) - size, int64_t{0}), 2 * size);
  }
  __device__ int64_t last(int64_t i) const {
    if (!bilinear) return quotient((i + 1) * output + size - 1, size);
    return min(output, quotient(output * (2 * i + 3) + size - 1, 2 * size));
  }
};

template <typename T>
struct Resize {
  const T* x;
  T* y;
  Image input;
  Resampling rows, columns;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const ResizeTap row = rows.tap(p.y), column = columns.tap(p.x);
    float sum[N] = {};
    for (int r = 0; r < 2; ++r)
      for (int s = 0; s < 2; ++s) {
        const float weight = row.weight(r) * column.weight(s);
        if (weight == 0.0f) continue;  // an infinite pixel must not count if its weight is 0
        const Vec<T, N> v = load<N>(x + input.at(p.n, p.c, row.at(r), column.at(s)));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = fmaf(weight, to_float(v.v[j]), sum[j]);
      }
    store_floats(y + at, sum);
  }
};

template <typename T>
struct ResizeBackward {
  const T* dy;
  T* dx;
  Image output;
  Resampling rows, columns;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    for (int64_t r = rows.first(p.y); r < rows.last(p.y); ++r) {
      const float row = rows.tap(r).weight_of(p.y);
      if (row == 0.0f) continue;
      for (int64_t s = columns.first(p.x); s < columns.last(p.x); ++s) {
        const float weight = row * columns.tap(s).weight_of(p.x);
        if (weight == 0.0f) continue;
        const Vec<T, N> v = load<N>(dy + output.at(p.n, p.c, r, s));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = fmaf(weight, to_float(v.v[j]), sum[j]);
      }
    }
    store_floats(dx + at, sum);
  }
};

// `written` and `read`: the images.
template <template <typename> class F>
const char* run_resize(const MbcCall& call, const ResizeArguments& a, const Image& written, const Image& read) {
  const Resampling rows{a.height, a.out_height, a.bilinear != 0}, columns{a.width, a.out_width, a.bilinear != 0};
  MBC_FOR_TYPE(a.type, T, {
    const T* from = in<T>(call, 0);
    T* to = out<T>(call, 1);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, written, aligned(from, 16) && aligned(to, 16),
                             F<T>{from, to, read, rows, columns});
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_resize(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ResizeArguments>(call);
  const Image input(a.layout, a.channels, a.height, a.width), output(a.layout, a.channels, a.out_height, a.out_width);
  return run_resize<Resize>(call, a, output, input);
}

extern "C" const char* mbc_resize_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ResizeArguments>(call);
  const Image input(a.layout, a.channels, a.height, a.width), output(a.layout, a.channels, a.out_height, a.out_width);
  return run_resize<ResizeBackward>(call, a, input, output);
}
