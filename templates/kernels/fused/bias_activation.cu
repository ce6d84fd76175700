// The gradients through a bias and the operation after it in a block of a transformer, GELU or a scale for each channel
// (LayerScale), with the sums over them, in one pass over memory each. They recompute the sum with the bias, which is
// never stored.
//
// Bytes      every operand in once, every result out once.
// Kernels    reductions (`reduce_image`, channel_reduce.cuh).
// Threads    as in batch_norm_relu.cu, and so are shared memory and registers.
// Limit      memory bandwidth; GELU's error function takes about as long.
#include "activations.cuh"
#include "batch_norm.cuh"
#include "channel_sum.cuh"

namespace mbc {

struct Biased {
  const float* bias;
  using Channel = float;
  __device__ float load(int64_t c) const { return bias[c]; }
};
struct BiasGeluBackward : Biased {
  __device__ float operator()(float b, float x, float dy) const { return GeluBackward{}(x + b, dy); }
};

// A bias and a scale.
template <typename T>
struct BiasedScaled {
  const float* bias;
  const T* gamma;
  struct Channel {
    float bias, gamma;
  };
  __device__ Channel load(int64_t c) const { return {bias[c], to_float(gamma[c])}; }
};
template <typename T>
struct Scale : BiasedScaled<T> {
  using Channel = typename BiasedScaled<T>::Channel;
  __device__ float operator()(const Channel& c, float, float dy) const { return dy * c.gamma; }
};

// A source: x, dy, and f of both, which is stored.
template <typename T, typename F>
struct MappedSource {
  static constexpr int OPERANDS = 2;
  const T *x, *dy;
  T* d;
  F f;

  template <int N>
  struct Fetched {
    Held<T, N> x, dy;
    float d[N];
  };
  bool vectorizable() const { return aligned(x, 16) && aligned(dy, 16) && aligned(d, 16); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> fetched;
    fetched.x = hold<N>(x + at);
    fetched.dy = hold<N>(dy + at);
    return fetched;
  }
  template <int N, typename Of>
  __device__ void finish(Fetched<N>& fetched, const Of& of, int64_t at) const {
#pragma unroll
    for (int j = 0; j < N; ++j) fetched.d[j] = f(of(j), to_float(fetched.x[j]), to_float(fetched.dy[j]));
    store_floats(d + at, fetched.d);
  }
};

// The stored value, for its sum,
template <typename T, typename F>
struct ResultSource : MappedSource<T, F> {
  template <int N>
  using Fetched = typename MappedSource<T, F>::template Fetched<N>;
  template <int N>
  __device__ float first(const Fetched<N>& fetched, int j) const { return fetched.d[j]; }
  template <int N>
  __device__ float second(const Fetched<N>&, int) const { return 0.0f; }
};
// or the operands, for sums over them.
template <typename T, typename F>
struct OperandSource : MappedSource<T, F> {
  template <int N>
  using Fetched = typename MappedSource<T, F>::template Fetched<N>;
  template <int N>
  __device__ float first(const Fetched<N>& fetched, int j) const { return to_float(fetched.x[j]); }
  template <int N>
  __device__ float second(const Fetched<N>& fetched, int j) const { return to_float(fetched.dy[j]); }
};

// ChannelSum with the channel constants of the map.
template <typename F>
struct SumOfMapped : ChannelSum {
  F f;
  using Channel = typename F::Channel;
  SumOfMapped(const ChannelSum& sum, const F& f_) : ChannelSum(sum), f(f_) {}
  __device__ Channel load(int64_t c) const { return f.load(c); }
  template <int K>
  __device__ void push(float& running, const Channel&, const float (&a)[K], const float (&b)[K]) const {
    ChannelSum::push<K>(running, {}, a, b);
  }
  __device__ float thread_state(const Channel&, float running, int64_t) const { return running; }
};

// Reductions of a bias and a scale after it: dbias = gamma * sum of dy, dgamma = sum of dy * (x + bias). The sums are
// those of batch normalization's backward pass, with the bias instead of minus the mean.
template <typename T>
struct LayerScaleReduction : BnBackwardReduction {
  BiasedScaled<T> of;
  using Channel = typename BiasedScaled<T>::Channel;

  LayerScaleReduction(const BiasedScaled<T>& of_, float* dbias, float* dgamma, int64_t accumulate)
      : BnBackwardReduction{nullptr, nullptr, dgamma, dbias, 0.0f, accumulate}, of(of_) {}
  __device__ Channel load(int64_t c) const { return of.load(c); }
  template <int K>
  __device__ void push(State& state, const Channel& channel, const float (&x)[K], const float (&dy)[K]) const {
    BnBackwardReduction::push<K>(state, -channel.bias, x, dy);
  }
  struct Prior {
    float gamma, dbias, dgamma;
  };
  __device__ Prior prior(int64_t c) const {
    return {of.load(c).gamma, accumulate ? dbeta[c] : 0.0f, accumulate ? dgamma[c] : 0.0f};
  }
  __device__ void finish(int64_t c, const Prior& prior, const Total& total) const {
    keep(c, {static_cast<float>(static_cast<double>(prior.dgamma) + total.dot),
             static_cast<float>(static_cast<double>(prior.dbias) + prior.gamma * total.sum)});
  }
};

}  // namespace mbc

// Operands: x, bias, dy; the gradient of x + bias, that of the bias, workspace.
extern "C" const char* mbc_bias_add_gelu_backward_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[5] : nullptr;
  const BiasGeluBackward f{in<float>(call, 1)};
  const SumOfMapped<BiasGeluBackward> sum({out<float>(call, 4), a.accumulate}, f);
  MBC_FOR_TYPE(a.type, T, {
    const ResultSource<T, BiasGeluBackward> source{{in<T>(call, 0), in<T>(call, 2), out<T>(call, 3), f}};
    reduce_image<T>(call, a, source, workspace, sum);
  });
  return launched();
}

// Operands: x, bias, dy, gamma; the gradient of x + bias, those of bias and gamma, workspace.
extern "C" const char* mbc_scale_backward_bias_sums(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[7] : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const BiasedScaled<T> of{in<float>(call, 1), in<T>(call, 3)};
    const OperandSource<T, Scale<T>> source{{in<T>(call, 0), in<T>(call, 2), out<T>(call, 4), {of}}};
    const LayerScaleReduction<T> sums(of, out<float>(call, 5), out<float>(call, 6), a.accumulate);
    reduce_image<T>(call, a, source, workspace, sums);
  });
  return launched();
}
