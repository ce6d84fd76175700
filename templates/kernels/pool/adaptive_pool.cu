// Average and maximum pooling to any size, and the gradients, which gather: every pixel reads the windows that contain
// it, so that no two threads write one element and the order of additions is fixed.
// Bytes      the input and the result once, and four bytes for the index of each maximum; pixels that windows share are
//            read again from the cache. Indices are channels first in either layout, like class numbers.
// Threads    256 in a grid-stride loop over the written elements: with channels last 16 bytes of channels of a pixel each,
//            with channels first one element (images.cuh).
// Limit      memory bandwidth; with few large windows the number of threads.
#include "images.cuh"
#include "adaptive_pool_arguments.h"
#include "adaptive_pool_operands.h"

namespace mbc {

// One axis.
struct Windows {
  int64_t size, output;

  __device__ int64_t begin(int64_t o) const { return quotient(o * size, output); }
  __device__ int64_t end(int64_t o) const { return quotient((o + 1) * size + output - 1, output); }
  // The windows that contain a pixel: from the first one up to before the last.
  __device__ int64_t first(int64_t i) const { return quotient(i * output, size); }
  __device__ int64_t last(int64_t i) const { return quotient((i + 1) * output + size - 1, size); }
};

template <typename T>
struct Pooling {
  const T* from;
  T* to;
  int32_t* index;  // of maxima, or null
  Image input, output;
  Windows rows, columns;

  __device__ int64_t index_at(const Pixel& p, int64_t channel, int64_t y, int64_t x) const {
    return ((p.n * output.channels + channel) * output.height + y) * output.width + x;
  }
};

template <typename T>
struct AdaptiveMean : Pooling<T> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t top = this->rows.begin(p.y), bottom = this->rows.end(p.y);
    const int64_t left = this->columns.begin(p.x), right = this->columns.end(p.x);
    float sum[N] = {};
    for (int64_t y = top; y < bottom; ++y) {
      float line[N] = {};  // a sum of short sums
      for (int64_t x = left; x < right; ++x) {
        const Vec<T, N> v = load<N>(this->from + this->input.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) line[j] += to_float(v.v[j]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += line[j];
    }
    const auto count = static_cast<float>((bottom - top) * (right - left));
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j] / count);
    store(this->to + at, result);
  }
};

template <typename T>
struct AdaptiveMeanBackward : Pooling<T> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    for (int64_t y = this->rows.first(p.y); y < this->rows.last(p.y); ++y)
      for (int64_t x = this->columns.first(p.x); x < this->columns.last(p.x); ++x) {
        const int64_t height = this->rows.end(y) - this->rows.begin(y);
        const int64_t width = this->columns.end(x) - this->columns.begin(x);
        const auto count = static_cast<float>(height * width);
        const Vec<T, N> v = load<N>(this->from + this->output.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += to_float(v.v[j]) / count;
      }
    store_floats(this->to + at, sum);
  }
};

template <typename T>
struct AdaptiveMax : Pooling<T> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t top = this->rows.begin(p.y), bottom = this->rows.end(p.y);
    const int64_t left = this->columns.begin(p.x), right = this->columns.end(p.x);
    Vec<T, N> best = load<N>(this->from + this->input.at(p.n, p.c, top, left));
    int32_t place[N];
#pragma unroll
    for (int j = 0; j < N; ++j) place[j] = static_cast<int32_t>(top * this->input.width + left);
    for (int64_t y = top; y < bottom; ++y)
      for (int64_t x = left; x < right; ++x) {
        const Vec<T, N> v = load<N>(this->from + this->input.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          // Written so that a NaN is greater than all, and the first of equals stays.
          const float seen = to_float(v.v[j]), greatest = to_float(best.v[j]);
          if (!(seen <= greatest) && greatest == greatest) {
            best.v[j] = v.v[j];
            place[j] = static_cast<int32_t>(y * this->input.width + x);
          }
        }
      }
    store(this->to + at, best);
    if (this->index == nullptr) return;
#pragma unroll
    for (int j = 0; j < N; ++j) this->index[this->index_at(p, p.c + j, p.y, p.x)] = place[j];
  }
};

template <typename T>
struct AdaptiveMaxBackward : Pooling<T> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const auto own = static_cast<int32_t>(p.y * this->input.width + p.x);
    float sum[N] = {};
    for (int64_t y = this->rows.first(p.y); y < this->rows.last(p.y); ++y)
      for (int64_t x = this->columns.first(p.x); x < this->columns.last(p.x); ++x) {
        const Vec<T, N> v = load<N>(this->from + this->output.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j)
          sum[j] += this->index[this->index_at(p, p.c + j, y, x)] == own ? to_float(v.v[j]) : 0.0f;
      }
    store_floats(this->to + at, sum);
  }
};

// `back`: what is written is the input.
template <template <typename> class F>
const char* run_adaptive(const MbcCall& call, const AdaptivePoolOperands& at, bool back) {
  const auto& a = arguments<AdaptivePoolArguments>(call);
  const Image input(a.layout, a.channels, a.height, a.width), output(a.layout, a.channels, a.out_height, a.out_width);
  const Windows rows{a.height, a.out_height}, columns{a.width, a.out_width};
  int32_t* indices = at.index;
  MBC_FOR_TYPE(a.type, T, {
    const T* read = at.from;
    T* written = at.to;
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, back ? input : output,
                             aligned(read, 16) && aligned(written, 16),
                             F<T>{{read, written, indices, input, output, rows, columns}});
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_adaptive_avg_pool(const MbcCall& call) {
  return mbc::run_adaptive<mbc::AdaptiveMean>(call, mbc::operands_of_adaptive_avg_pool(call), false);
}
extern "C" const char* mbc_adaptive_avg_pool_backward(const MbcCall& call) {
  return mbc::run_adaptive<mbc::AdaptiveMeanBackward>(call, mbc::operands_of_adaptive_avg_pool_backward(call), true);
}
extern "C" const char* mbc_adaptive_max_pool(const MbcCall& call) {
  return mbc::run_adaptive<mbc::AdaptiveMax>(call, mbc::operands_of_adaptive_max_pool(call), false);
}
extern "C" const char* mbc_adaptive_max_pool_backward(const MbcCall& call) {
  return mbc::run_adaptive<mbc::AdaptiveMaxBackward>(call, mbc::operands_of_adaptive_max_pool_backward(call), true);
}
