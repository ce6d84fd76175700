// Backward pass of batch normalization before a maximum pool, from the gradient of the pooled image, optionally added
// to another gradient of the pool's input. There are two launches, reductions and gradient of x, both of which gather:
// the gradient between pool and normalization is never stored.
//
// Bytes      reductions: x, gradient and index of the pooled image (and the other gradient) in, two sums for each channel
//            out. Gradient: the same in, the gradient of x out.
// Reduction  `parts` blocks write partial sums, a second kernel merges them in order, in fp64 (channel_reduce.cuh).
// Threads    with channels last a thread keeps 16 bytes of channels and walks over pixels (max_pool_backward.cuh).
// Limit      memory bandwidth.
#include "batch_norm.cuh"
#include "max_pool_backward.cuh"

namespace mbc {

// An epilogue for reductions over x and the gradient.
template <typename T>
struct ReductionOverX {
  static constexpr int OPERANDS = 1;
  const T* x;

  struct Channel {};
  template <int N>
  struct Fetched {
    Packed<T, N> x;
  };
  bool vectorizable() const { return aligned(x, 16); }
  __device__ Channel load(int64_t) const { return {}; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const { return {Packed<T, N>::at(x + at)}; }
  template <int N>
  __device__ void use(const Channel (&)[N], const Fetched<N>&, int64_t, float (&)[N]) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, const float (&)[N], int j) const { return f.x.value(j); }
  template <int N>
  __device__ float second(const Fetched<N>&, const float (&d)[N], int j) const { return d[j]; }
};

// An epilogue that stores the gradient of x.
template <typename T>
struct NormalizeBackwardEpilogue {
  static constexpr int OPERANDS = 1;
  const T* x;
  T* dx;
  NormalizeBackward backward;

  using Channel = NormalizeBackward::Channel;
  template <int N>
  using Fetched = typename ReductionOverX<T>::template Fetched<N>;
  bool vectorizable() const { return aligned(x, 16) && aligned(dx, 16); }
  __device__ Channel load(int64_t c) const { return backward.load(c); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const { return {Packed<T, N>::at(x + at)}; }
  template <int N>
  __device__ void use(const Channel (&channel)[N], const Fetched<N>& f, int64_t at, float (&d)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) d[j] = backward(channel[j], f.x.value(j), d[j]);
    Packed<T, N>::of(d).write(dx + at);
  }
};

// An epilogue before epilogue U: it adds another gradient, which may be a slice of a wider one, then applies ReLU's
// backward pass by its output, which it recomputes from x.
template <typename T, bool SLICED, typename U>
struct AddReluBackwardEpilogue {
  static constexpr int OPERANDS = 1 + U::OPERANDS;
  const T* addend;
  Slice slice;
  Normalize forward;
  U u;

  struct Channel {
    Normalize::Channel forward;
    typename U::Channel own;
  };
  template <int N>
  struct Fetched {
    Packed<T, N> addend;
    typename U::template Fetched<N> own;
  };
  bool vectorizable() const { return aligned(addend, 16) && slice.gap % WIDTH<T> == 0 && u.vectorizable(); }
  __device__ Channel load(int64_t c) const { return {forward.load(c), u.load(c)}; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    return {Packed<T, N>::at(addend + (SLICED ? slice(at) : at)), u.template fetch<N>(at)};
  }
  template <int N>
  __device__ void use(const Channel (&channel)[N], const Fetched<N>& f, int64_t at, float (&d)[N]) const {
    typename U::Channel own[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float y = forward(channel[j].forward, f.own.x.value(j), 0.0f);
      d[j] = y > ROUNDS_TO_ZERO<T> ? d[j] + f.addend.value(j) : 0.0f;
      own[j] = channel[j].own;
    }
    u.template use<N>(own, f.own, at, d);
  }
  template <int N>
  __device__ float first(const Fetched<N>& f, const float (&d)[N], int j) const {
    return u.template first<N>(f.own, d, j);
  }
  template <int N>
  __device__ float second(const Fetched<N>& f, const float (&d)[N], int j) const {
    return u.template second<N>(f.own, d, j);
  }
};

// SLICED: the group's integers from `number` on are the first channel of the slice and the channels of the whole
// tensor.
template <bool SLICED, typename T, typename U>
AddReluBackwardEpilogue<T, SLICED, U> add_relu_backward_epilogue(const MbcCall& call, int number, const T* addend,
                                                  const Normalize& forward, const U& u) {
  const auto& a = arguments<PoolArguments>(call);
  if constexpr (!SLICED) return {addend, {}, forward, u};
  const int64_t start = group_integer(call, number), all = group_integer(call, number + 1), inner = a.height * a.width;
  return {addend + start * (a.layout == MBC_CHANNELS_LAST ? 1 : inner), {a.layout, a.channels, all, inner}, forward, u};
}

template <bool SLICED>
const char* max_pool_backward_add_bn_reduce(const MbcCall& call) {
  const auto& a = arguments<PoolArguments>(call);
  const int64_t affine = group_integer(call, 0), parts = group_integer(call, 1), accumulate = group_integer(call, 2);
  const int index = affine ? 5 : 3, dgamma = index + 3;
  void* workspace = parts > 1 ? call.pointers[dgamma + 2] : nullptr;
  const Normalize forward = normalize(call, 1, affine, eps(call, 0));
  const BnBackwardReduction sums{forward.mean, forward.variance, out<float>(call, dgamma), out<float>(call, dgamma + 1),
                  eps(call, 1), accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{in<uint8_t>(call, index), nullptr, in<T>(call, index + 1)};
    const auto u = add_relu_backward_epilogue<SLICED>(call, 3, in<T>(call, index + 2), forward, ReductionOverX<T>{in<T>(call, 0)});
    gather_pool_sums(call.stream, a, pooled, u, parts, workspace, sums);
  });
  return launched();
}

template <bool SLICED>
const char* max_pool_backward_add_bn_backward(const MbcCall& call) {
  const auto& a = arguments<PoolArguments>(call);
  const int64_t affine = group_integer(call, 0), count = group_integer(call, 1);
  const int index = affine ? 5 : 3, dgamma = index + 3;
  const Normalize forward = normalize(call, 1, affine, eps(call, 0));
  const NormalizeBackward backward{forward.mean, forward.variance, in<float>(call, dgamma), in<float>(call, dgamma + 1),
                                   forward.gamma, eps(call, 1), static_cast<float>(count)};
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{in<uint8_t>(call, index), nullptr, in<T>(call, index + 1)};
    const NormalizeBackwardEpilogue<T> back{in<T>(call, 0), out<T>(call, dgamma + 2), backward};
    gather_pool(call.stream, a, pooled,
                add_relu_backward_epilogue<SLICED>(call, 2, in<T>(call, index + 2), forward, back));
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_relu_max_pool_backward_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  const int64_t parts = group_integer(call, 1), accumulate = group_integer(call, 2);
  void* workspace = parts > 1 ? call.pointers[8] : nullptr;
  const BnBackwardReduction sums{in<float>(call, 4), in<float>(call, 5), out<float>(call, 6), out<float>(call, 7), eps(call, 0),
                  accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{in<uint8_t>(call, 2), in<T>(call, 0), in<T>(call, 1)};
    gather_pool_sums(call.stream, a, pooled, ReductionOverX<T>{in<T>(call, 3)}, parts, workspace, sums);
  });
  return launched();
}

extern "C" const char* mbc_relu_max_pool_backward_bn_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  const int64_t affine = group_integer(call, 0), count = group_integer(call, 1);
  const NormalizeBackward backward{in<float>(call, 4), in<float>(call, 5), in<float>(call, 6), in<float>(call, 7),
                                   affine ? in<float>(call, 8) : nullptr, eps(call, 0),
                                   static_cast<float>(count)};
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{in<uint8_t>(call, 2), in<T>(call, 0), in<T>(call, 1)};
    gather_pool(call.stream, a, pooled,
                NormalizeBackwardEpilogue<T>{in<T>(call, 3), out<T>(call, affine ? 9 : 8), backward});
  });
  return launched();
}

extern "C" const char* mbc_max_pool_backward_add_bn_reduce(const MbcCall& call) {
  return mbc::max_pool_backward_add_bn_reduce<false>(call);
}
extern "C" const char* mbc_max_pool_backward_add_slice_bn_reduce(const MbcCall& call) {
  return mbc::max_pool_backward_add_bn_reduce<true>(call);
}
extern "C" const char* mbc_max_pool_backward_add_bn_backward(const MbcCall& call) {
  return mbc::max_pool_backward_add_bn_backward<false>(call);
}
extern "C" const char* mbc_max_pool_backward_add_slice_bn_backward(const MbcCall& call) {
  return mbc::max_pool_backward_add_bn_backward<true>(call);
}
