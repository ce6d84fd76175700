// Nearest-neighbour upsampling by whole factors, and its gradient: the sum over the copies of a pixel.
//
// Bytes      the small image in and the large one out; backward the reverse.
// Threads    256 in a grid-stride loop over output elements: with channels last 16 bytes of channels of a pixel each, with
//            channels first one element (images.cuh).
// Limit      memory bandwidth.
#include "images.cuh"
#include "pooling_arguments.h"

namespace mbc {

template <typename T>
struct Upsample {
  const T* x;
  T* y;
  Image small;
  int32_t factor_height, factor_width;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    store(y + at, load<N>(x + small.at(p.n, p.c, p.y / factor_height, p.x / factor_width)));
  }
};

template <typename T>
struct UpsampleBackward {
  const T* dy;
  T* dx;
  Image large;
  int32_t factor_height, factor_width;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float sum[N] = {};
    for (int32_t r = 0; r < factor_height; ++r)
      for (int32_t s = 0; s < factor_width; ++s) {
        const Vec<T, N> v =
            load<N>(dy + large.at(p.n, p.c, p.y * factor_height + r, p.x * factor_width + s));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += to_float(v.v[j]);
      }
    store_floats(dx + at, sum);
  }
};

// F: the functor of a type, from small to large images, or from large to small ones (BACKWARD).
template <template <typename> typename F, bool BACKWARD>
const char* run_upsample(const MbcCall& call) {
  const auto& a = arguments<UpsampleArguments>(call);
  const Image small(a.layout, a.channels, a.height, a.width);
  const Image large(a.layout, a.channels, a.height * a.factor_height, a.width * a.factor_width);
  MBC_FOR_TYPE(a.type, T, {
    const T* from = in<T>(call, 0);
    T* to = out<T>(call, 1);
    for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, BACKWARD ? small : large, aligned(from, 16) && aligned(to, 16),
                             F<T>{from, to, BACKWARD ? large : small, static_cast<int32_t>(a.factor_height),
                                  static_cast<int32_t>(a.factor_width)});
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_upsample(const MbcCall& call) { return mbc::run_upsample<mbc::Upsample, false>(call); }
extern "C" const char* mbc_upsample_backward(const MbcCall& call) {
  return mbc::run_upsample<mbc::UpsampleBackward, true>(call);
}
