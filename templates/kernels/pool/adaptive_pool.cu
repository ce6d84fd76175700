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
  __device__ int64_t length(int64_t o) const { return end(o) - begin(o); }
  // The windows that contain a pixel: from the first one up to before the last.
  __device__ int64_t first(int64_t i) const { return quotient(i * output, size); }
  __device__ int64_t last(int64_t i) const { return quotient((i + 1) * output + size - 1, size); }
};

// A volume (DEEP) is an image whose planes lie one below the other.
template <typename T, bool DEEP>
struct Pooling {
  const T* from;
  T* to;
  int32_t* index;  // of maxima, or null
  Image input, output;
  Windows planes, rows, columns;

  __device__ int64_t index_at(const Pixel& p, int64_t channel, int64_t y, int64_t x) const {
    return ((p.n * output.channels + channel) * output.height + y) * output.width + x;
  }
  // Calls `each` for the lines of the window of an output line.
  template <typename Each>
  __device__ void each_line(int64_t at, Each each) const {
    const int64_t z = DEEP ? quotient(at, rows.output) : 0, y = at - z * rows.output;
    const int64_t top = rows.begin(y), bottom = rows.end(y);
    for (int64_t plane = DEEP ? planes.begin(z) : 0; plane < (DEEP ? planes.end(z) : 1); ++plane)
      for (int64_t line = plane * rows.size + top; line < plane * rows.size + bottom; ++line) each(line);
  }
  // Calls `each` for the windows' lines that contain an input line: the line of the output, and how many lines it reads.
  template <typename Each>
  __device__ void each_window(int64_t at, Each each) const {
    const int64_t z = DEEP ? quotient(at, rows.size) : 0, y = at - z * rows.size;
    const int64_t first = rows.first(y), last = rows.last(y);
    for (int64_t plane = DEEP ? planes.first(z) : 0; plane < (DEEP ? planes.last(z) : 1); ++plane)
      for (int64_t o = first; o < last; ++o)
        each(plane * rows.output + o, rows.length(o) * (DEEP ? planes.length(plane) : 1));
  }
};

template <typename T, bool DEEP>
struct AdaptiveMean : Pooling<T, DEEP> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t left = this->columns.begin(p.x), right = this->columns.end(p.x);
    float sum[N] = {};
    int64_t lines = 0;
    this->each_line(p.y, [&](int64_t y) {
      float line[N] = {};  // a sum of short sums
      for (int64_t x = left; x < right; ++x) {
        const Vec<T, N> v = load<N>(this->from + this->input.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) line[j] += to_float(v.v[j]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += line[j];
      ++lines;
    });
    const auto count = static_cast<float>(lines * (right - left));
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j] / count);
    store(this->to + at, result);
  }
};

template <typename T, bool DEEP>
struct AdaptiveMeanBackward : Pooling<T, DEEP> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    const int64_t first = this->columns.first(p.x), last = this->columns.last(p.x);
    this->each_window(p.y, [&](int64_t y, int64_t lines) {
      for (int64_t x = first; x < last; ++x) {
        const auto count = static_cast<float>(lines * this->columns.length(x));
        const Vec<T, N> v = load<N>(this->from + this->output.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += to_float(v.v[j]) / count;
      }
    });
    store_floats(this->to + at, sum);
  }
};

template <typename T, bool DEEP>
struct AdaptiveMax : Pooling<T, DEEP> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const int64_t left = this->columns.begin(p.x), right = this->columns.end(p.x);
    Vec<T, N> best{};
    int32_t place[N];
    bool first = true;
    this->each_line(p.y, [&](int64_t y) {
      for (int64_t x = left; x < right; ++x, first = false) {
        const Vec<T, N> v = load<N>(this->from + this->input.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          // Written so that a NaN is greater than all, and the first of equals stays.
          const float seen = to_float(v.v[j]), greatest = to_float(best.v[j]);
          if (first || (!(seen <= greatest) && greatest == greatest)) {
            best.v[j] = v.v[j];
            place[j] = static_cast<int32_t>(y * this->input.width + x);
          }
        }
      }
    });
    store(this->to + at, best);
    if (this->index == nullptr) return;
#pragma unroll
    for (int j = 0; j < N; ++j) this->index[this->index_at(p, p.c + j, p.y, p.x)] = place[j];
  }
};

template <typename T, bool DEEP>
struct AdaptiveMaxBackward : Pooling<T, DEEP> {
  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    const auto own = static_cast<int32_t>(p.y * this->input.width + p.x);
    float sum[N] = {};
    const int64_t first = this->columns.first(p.x), last = this->columns.last(p.x);
    this->each_window(p.y, [&](int64_t y, int64_t) {
      for (int64_t x = first; x < last; ++x) {
        const Vec<T, N> v = load<N>(this->from + this->output.at(p.n, p.c, y, x));
#pragma unroll
        for (int j = 0; j < N; ++j)
          sum[j] += this->index[this->index_at(p, p.c + j, y, x)] == own ? to_float(v.v[j]) : 0.0f;
      }
    });
    store_floats(this->to + at, sum);
  }
};

// `back`: what is written is the input.
template <template <typename, bool> class F>
const char* run_adaptive(const MbcCall& call, const AdaptivePoolOperands& at, bool back) {
  const auto& a = arguments<AdaptivePoolArguments>(call);
  const Image input(a.layout, a.channels, a.depth * a.height, a.width);
  const Image output(a.layout, a.channels, a.out_depth * a.out_height, a.out_width);
  const Windows planes{a.depth, a.out_depth}, rows{a.height, a.out_height}, columns{a.width, a.out_width};
  int32_t* indices = at.index;
  MBC_FOR_TYPE(a.type, T, {
    constexpr int N = WIDTH<T>;
    const T* read = at.from;
    T* written = at.to;
    const bool wide = aligned(read, 16) && aligned(written, 16);
    const auto run = [&](auto f) { for_each_pixel<N>(call.stream, a.layout, a.rows, back ? input : output, wide, f); };
    if (a.depth * a.out_depth > 1)
      run(F<T, true>{{read, written, indices, input, output, planes, rows, columns}});
    else
      run(F<T, false>{{read, written, indices, input, output, planes, rows, columns}});
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
