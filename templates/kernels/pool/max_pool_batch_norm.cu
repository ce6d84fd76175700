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
#include "max_pool_batch_norm_operands.h"
#include "fused_pooling_arguments.h"

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

// SLICED: the first channel of the slice and the channels of the whole tensor follow the structure A.
template <bool SLICED, typename A, typename T, typename U>
AddReluBackwardEpilogue<T, SLICED, U> add_relu_backward_epilogue(const MbcCall& call, const T* addend,
                                                                 const Normalize& forward, const U& u) {
  const auto& a = arguments<A>(call);
  if constexpr (!SLICED) return {addend, {}, forward, u};
  const int64_t* slice = call.integers + sizeof(A) / sizeof(int64_t);
  const int64_t inner = a.height * a.width, start = slice[0] * (a.layout == MBC_CHANNELS_LAST ? 1 : inner);
  return {addend + start, {a.layout, a.channels, slice[1], inner}, forward, u};
}

template <bool SLICED>
const char* max_pool_backward_add_bn_reduce(const MbcCall& call, const MaxPoolBatchNormOperands& at) {
  const auto& a = arguments<PoolSumArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const BnBackwardReduction sums = sums_of(at, eps(call, 1), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{at.index, nullptr, at.dy};
    const auto u = add_relu_backward_epilogue<SLICED, PoolSumArguments>(call, at.dy2.as<const T>(), forward,
                                                                        ReductionOverX<T>{at.x});
    gather_pool_sums(call.stream, a, pooled, u, a.parts, at.workspace, sums);
  });
  return launched();
}

template <bool SLICED>
const char* max_pool_backward_add_bn_backward(const MbcCall& call, const MaxPoolBatchNormOperands& at) {
  using Arguments = PoolNormalizeBackwardArguments;
  const auto& a = arguments<Arguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const NormalizeBackward backward = normalize_backward(at, eps(call, 1), a.count);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{at.index, nullptr, at.dy};
    const NormalizeBackwardEpilogue<T> back{at.x, at.dx, backward};
    gather_pool(call.stream, a, pooled,
                add_relu_backward_epilogue<SLICED, Arguments>(call, at.dy2.as<const T>(), forward, back));
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_relu_max_pool_backward_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolSumArguments>(call);
  const auto at = operands_of_relu_max_pool_backward_bn_reduce(call);
  const BnBackwardReduction sums = sums_of(at, eps(call, 0), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{at.index, at.relu, at.dy};
    gather_pool_sums(call.stream, a, pooled, ReductionOverX<T>{at.x}, a.parts, at.workspace, sums);
  });
  return launched();
}

extern "C" const char* mbc_relu_max_pool_backward_bn_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolNormalizeBackwardArguments>(call);
  const auto at = operands_of_relu_max_pool_backward_bn_backward(call);
  const NormalizeBackward backward = normalize_backward(at, eps(call, 0), a.count);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{at.index, at.relu, at.dy};
    gather_pool(call.stream, a, pooled, NormalizeBackwardEpilogue<T>{at.x, at.dx, backward});
  });
  return launched();
}

MBC_LAUNCHER(max_pool_backward_add_bn_reduce, max_pool_backward_add_bn_reduce<false>)
MBC_LAUNCHER(max_pool_backward_add_slice_bn_reduce, max_pool_backward_add_bn_reduce<true>)
MBC_LAUNCHER(max_pool_backward_add_bn_backward, max_pool_backward_add_bn_backward<false>)
MBC_LAUNCHER(max_pool_backward_add_slice_bn_backward, max_pool_backward_add_bn_backward<true>)
