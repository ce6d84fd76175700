// A bias for every channel, and its gradient.
#include "mbc_channel_sum.cuh"

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

}  // namespace mbc

extern "C" const char* mbc_bias_add(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<BiasAddArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    map_channels<0>(call.stream, a.layout, a.rows, a.channels, a.inner, Operands<T>{in<T>(call, 0), nullptr},
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
