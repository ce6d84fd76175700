// A bias for every channel, and its gradient.
#include "mbc_channels.cuh"

struct BiasAddArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t inner;
};

struct ChannelSumArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t inner;
  int64_t parts;
  int64_t accumulate;
};

namespace mbc {

struct Bias {
  const float* bias;
  using Channel = float;
  __device__ float load(int64_t c) const { return bias[c]; }
  __device__ float operator()(float b, float x, float) const { return x + b; }
};

struct ChannelSum {
  float* sum;
  int64_t accumulate;

  template <typename Real>
  struct State {
    Real sum;
  };
  struct Channel {};

  __device__ Channel load(int64_t) const { return {}; }
  template <int K>
  __device__ void push(State<float>& state, const Channel&, const float (&a)[K], const float (&)[K]) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) sum += a[k];
    state.sum += sum;
  }
  template <typename Real>
  __device__ void merge(State<Real>& into, const State<Real>& from) const { into.sum += from.sum; }
  __device__ State<double> widen(const State<float>& state) const { return {state.sum}; }
  __device__ void finish(int64_t c, const State<double>& state) const {
    sum[c] = static_cast<float>((accumulate ? static_cast<double>(sum[c]) : 0.0) + state.sum);
  }
};

}  // namespace mbc

extern "C" const char* mbc_bias_add(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<BiasAddArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    map_channels<false>(call.stream, a.layout, a.rows, a.channels, a.inner, Operands<T>{in<T>(call, 0), nullptr},
                        out<T>(call, 2), Bias{in<float>(call, 1)});
  });
  return launched();
}

extern "C" const char* mbc_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ChannelSumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[2] : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    reduce_channels<false>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts,
                           Operands<T>{in<T>(call, 0), nullptr}, workspace,
                           ChannelSum{out<float>(call, 1), a.accumulate});
  });
  return launched();
}
