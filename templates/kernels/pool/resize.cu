// Images in another size, nearest, linear or cubic, and the gradient, which gathers: every pixel of the input adds the
// gradients of those output pixels that read it, so that no two threads write one element and the order of additions is
// fixed.
//
// Bytes      the input once, the result once; repeated reads of a pixel come from the cache.
// Threads    256 in a grid-stride loop over the elements that are written: with channels last 16 bytes of channels of a
//            pixel each, with channels first one element (images.cuh).
// Limit      memory bandwidth; with channels first, and cubic, index arithmetic.
#include "images.cuh"
#include "pooling_arguments.h"

namespace mbc {

// The PIXELS neighbouring pixels of the input around a position of the output, and their weights. The first may lie
// outside; its neighbour at the edge stands for a pixel outside.
template <int PIXELS>
struct ResizeTap {
  int64_t first, last;
  float share;

  __device__ int64_t at(int i) const { return max(min(first + i, last), int64_t{0}); }
  __device__ float weight(int i) const {
    if constexpr (PIXELS == 1) return 1.0f;
    if constexpr (PIXELS == 2) return i == 0 ? 1.0f - share : share;
    // Keys' cubic by the distance of the pixel, which is below 1 for the two pixels in the middle.
    const float a = -0.75f, x = i < 2 ? share + (1 - i) : i - 1 - share;
    return i == 1 || i == 2 ? ((a + 2) * x - (a + 3)) * x * x + 1 : ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
  }
  // The weight of pixel p of the input at this position.
  __device__ float weight_of(int64_t p) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) sum += at(i) == p ? weight(i) : 0.0f;
    return sum;
  }
};

// One axis: position o of the output is pixel (step * o + offset) / unit of the input.
template <int PIXELS>
struct Resampling {
  int64_t size, output, step, offset, unit;

  __device__ ResizeTap<PIXELS> tap(int64_t position) const {
    const int64_t at = step * position + offset, inside = max(at, int64_t{0});
    int64_t first = quotient(inside, unit);
    float share = 0.0f;
    if (PIXELS == 4 && at < 0) {
      first = -quotient(unit - 1 - at, unit);
      share = static_cast<float>(at - first * unit) / static_cast<float>(unit);
    } else if (PIXELS > 1) {
      share = static_cast<float>(inside - first * unit) / static_cast<float>(unit);
    }
    return {PIXELS == 4 ? first - 1 : first, size - 1, share};
  }
  // Positions of the output that may read pixel i of the input: from the first one up to before the last.
  __device__ int64_t first(int64_t i) const { return step == 0 ? 0 : behind(i - PIXELS / 2); }
  __device__ int64_t last(int64_t i) const {
    return step == 0 ? output : min(output, behind(i + (PIXELS == 1 ? 1 : PIXELS / 2)));
  }
  // The first position that is not before pixel i.
  __device__ int64_t behind(int64_t i) const {
    const int64_t at = i * unit - offset;
    return at <= 0 ? 0 : quotient(at + step - 1, step);
  }
};

template <typename T, int PIXELS>
struct Resize {
  const T* x;
  T* y;
  Image input;
  Resampling<PIXELS> rows, columns;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const ResizeTap<PIXELS> row = rows.tap(p.y), column = columns.tap(p.x);
    float sum[N] = {};
#pragma unroll
    for (int r = 0; r < PIXELS; ++r)
#pragma unroll
      for (int s = 0; s < PIXELS; ++s) {
        const float weight = row.weight(r) * column.weight(s);
        if (weight == 0.0f) continue;  // an infinite pixel must not count if its weight is 0
        const Vec<T, N> v = load<N>(x + input.at(p.n, p.c, row.at(r), column.at(s)));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = fmaf(weight, to_float(v.v[j]), sum[j]);
      }
    store_floats(y + at, sum);
  }
};

template <typename T, int PIXELS>
struct ResizeBackward {
  const T* dy;
  T* dx;
  Image output;
  Resampling<PIXELS> rows, columns;

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
template <template <typename, int> class F, int PIXELS>
const char* run_resize(const MbcCall& call, const ResizeArguments& a, const Image& written, const Image& read) {
  const Resampling<PIXELS> rows{a.height, a.out_height, a.step_height, a.offset_height, a.unit_height};
  const Resampling<PIXELS> columns{a.width, a.out_width, a.step_width, a.offset_width, a.unit_width};
  MBC_FOR_TYPE(a.type, T, {
    const T* from = in<T>(call, 0);
    T* to = out<T>(call, 1);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, written, aligned(from, 16) && aligned(to, 16),
                             F<T, PIXELS>{from, to, read, rows, columns});
  });
  return launched();
}

template <template <typename, int> class F, bool BACKWARD>
const char* resize(const MbcCall& call) {
  const auto& a = arguments<ResizeArguments>(call);
  const Image input(a.layout, a.channels, a.height, a.width), output(a.layout, a.channels, a.out_height, a.out_width);
  const Image &written = BACKWARD ? input : output, &read = BACKWARD ? output : input;
  if (a.pixels == 1) return run_resize<F, 1>(call, a, written, read);
  return a.pixels == 2 ? run_resize<F, 2>(call, a, written, read) : run_resize<F, 4>(call, a, written, read);
}

}  // namespace mbc

extern "C" const char* mbc_resize(const MbcCall& call) { return mbc::resize<mbc::Resize, false>(call); }
extern "C" const char* mbc_resize_backward(const MbcCall& call) { return mbc::resize<mbc::ResizeBackward, true>(call); }
