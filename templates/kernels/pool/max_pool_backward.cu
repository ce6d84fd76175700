// Data gradient of maximum pooling: alone, through ReLU, added to up to three other gradients, or with the gradient of
// a bias. It gathers (max_pool_backward.cuh): no two threads write one element and the order of additions is fixed.
//
// Bytes      gradient and index of the pooled image in, other gradients in, the data gradient out.
// Reduction  the bias' gradient: `parts` blocks write a sum each, a second kernel adds them in order, in fp64.
// Threads    with channels last a thread keeps 16 bytes of channels and walks over pixels.
// Limit      memory bandwidth.
#include "channel_sum.cuh"
#include "max_pool_backward.cuh"
#include "max_pool_backward_operands.h"
#include "fused_pooling_arguments.h"

namespace mbc {

// Adds other gradients of the same image, one after another.
template <typename T, int ADDENDS>
struct AddGradients {
  static constexpr int OPERANDS = ADDENDS;
  const T* addends[ADDENDS];
  WriteGradient<T> write;

  using Channel = typename WriteGradient<T>::Channel;
  template <int N>
  struct Fetched {
    Packed<T, N> addends[ADDENDS];
  };
  bool vectorizable() const {
    bool all = write.vectorizable();
    for (const T* one : addends) all = all && aligned(one, 16);
    return all;
  }
  __device__ Channel load(int64_t) const { return {}; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
#pragma unroll
    for (int i = 0; i < ADDENDS; ++i) f.addends[i] = Packed<T, N>::at(addends[i] + at);
    return f;
  }
  template <int N>
  __device__ void use(const Channel (&channel)[N], const Fetched<N>& f, int64_t at, float (&d)[N]) const {
#pragma unroll
    for (int i = 0; i < ADDENDS; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) d[j] += f.addends[i].value(j);
    write.template use<N>(channel, {}, at, d);
  }
};

// Windows along three axes, or with dilation.
template <typename T>
struct AnyMaxPoolBackward {
  PooledGradient<T, false> pooled;
  Window window;
  T* dx;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float d[N] = {};
    window.each_window<true>(p, [&](int32_t position, int32_t line, int32_t column) {
      const auto fetched = pooled.template fetch<N>(window.output.at(p.n, p.c, line, column));
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (fetched.where[j] == position) d[j] += fetched.dp.value(j);
    });
    Packed<T, N>::of(d).write(dx + at);
  }
};

template <int ADDENDS>
const char* max_pool_backward_add(const MbcCall& call) {
  const auto& a = arguments<PoolArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{in<uint8_t>(call, 0), nullptr, in<T>(call, 1)};
    AddGradients<T, ADDENDS> u{{}, {out<T>(call, 2 + ADDENDS)}};
    for (int i = 0; i < ADDENDS; ++i) u.addends[i] = in<T>(call, 2 + i);
    gather_pool(call.stream, a, pooled, u);
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_max_pool_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, false> pooled{in<uint8_t>(call, 0), nullptr, in<T>(call, 1)};
    T* dx = out<T>(call, 2);
    const Window window(a);
    if (a.any)
      for_each_pixel<WIDTH<T>>(call.stream, a.layout, a.rows, window.input, pooled.vectorizable() && aligned(dx, 16),
                               AnyMaxPoolBackward<T>{pooled, window, dx});
    else
      gather_pool(call.stream, a, pooled, WriteGradient<T>{dx});
  });
  return launched();
}

extern "C" const char* mbc_max_pool_backward_add(const MbcCall& call) { return mbc::max_pool_backward_add<1>(call); }
extern "C" const char* mbc_max_pool_backward_add_two(const MbcCall& call) { return mbc::max_pool_backward_add<2>(call); }
extern "C" const char* mbc_max_pool_backward_add_three(const MbcCall& call) {
  return mbc::max_pool_backward_add<3>(call);
}

extern "C" const char* mbc_relu_max_pool_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{in<uint8_t>(call, 2), in<T>(call, 0), in<T>(call, 1)};
    gather_pool(call.stream, a, pooled, WriteGradient<T>{out<T>(call, 3)});
  });
  return launched();
}

extern "C" const char* mbc_relu_max_pool_backward_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<PoolSumArguments>(call);
  const auto at = operands_of_relu_max_pool_backward_channel_sum(call);
  const ChannelSum sum{at.sum, a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const PooledGradient<T, true> pooled{at.index, at.relu, at.dy};
    gather_pool_sums(call.stream, a, pooled, WriteGradient<T>{at.d}, a.parts, at.workspace, sum);
  });
  return launched();
}
