// Group, layer and root mean square normalization. The elements that are normalized together are a set: the channels of
// a group and all pixels of an image, or the channels of one pixel. Root mean square normalization is not CENTERED: it
// has neither mean nor shift. Forward and backward are one launch each, in place or not; the gradients of scale and
// shift are reductions by channel (channel_reduce.cuh).
//
// Bytes      the tensors in and out once; a set that does not fit into registers is read again (forward twice, backward
//            once) from the cache.
// Threads    with channels last and up to 256 vectors of channels, 1 to 32 lanes of a warp hold a pixel's channels,
//            so that a warp normalizes several pixels at a time. Otherwise a warp has a set of up to 512 vectors, with 8
//            warps in a block, and a block has a larger set. Vectors of 16 bytes are of pixels with channels first, of channels
//            with channels last. Sums have a fixed order.
// Limit      memory bandwidth; with few large sets the number of blocks.
#include "batch_norm.cuh"
#include "norm_sets.cuh"
#include "group_norm_arguments.h"
#include "group_norm_operands.h"

namespace mbc {

template <typename T, bool CENTERED>
struct NormalizeSets {
  static constexpr int OPERANDS = 1;
  const T* operands[1];
  T* y;
  const float *gamma, *beta;  // null: 1 and 0; beta and mean are null if not centred
  float *mean, *inverse;
  float eps;

  bool vectorizable() const { return aligned(operands[0], 16) && aligned(y, 16); }
  bool constants_vectorizable(size_t bytes) const {
    return aligned(gamma, bytes) && (!CENTERED || aligned(beta, bytes));
  }

  template <int N, typename Set>
  __device__ void run(const Set& set, float count) const {
    float m = 0.0f, squares = 0.0f;
    if constexpr (CENTERED) {
      float sum = 0.0f;
      set.each([&](const auto& v, const SetPlace&) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum += v.get(0, j);
      });
      m = set.sum(sum) / count;
    }
    set.each([&](const auto& v, const SetPlace&) {
#pragma unroll
      for (int j = 0; j < N; ++j) squares = fmaf(v.get(0, j) - m, v.get(0, j) - m, squares);
    });
    const float scale = 1.0f / sqrtf(set.sum(squares) / count + eps);
    set.each([&](const auto& v, const SetPlace& p) {
      const Vec<float, N> g = set.constants(gamma, p), b = CENTERED ? set.constants(beta, p, 0.0f) : Vec<float, N>{};
      float result[N];
#pragma unroll
      for (int j = 0; j < N; ++j) result[j] = fmaf((v.get(0, j) - m) * scale, g.v[j], b.v[j]);
      store_floats(y + p.at, result);
    });
    if (CENTERED && set.first) mean[set.number] = m;
    if (set.first) inverse[set.number] = scale;
  }
};

// ADD: a second gradient of x is added.
template <typename T, bool CENTERED, bool ADD>
struct NormalizeSetsBackward {
  static constexpr int OPERANDS = 2 + ADD;
  const T* operands[OPERANDS];  // x, dy and the other gradient
  T* dx;
  const float *mean, *inverse, *gamma;

  bool vectorizable() const {
    for (const T* operand : operands)
      if (!aligned(operand, 16)) return false;
    return aligned(dx, 16);
  }
  bool constants_vectorizable(size_t bytes) const { return aligned(gamma, bytes); }

  template <int N, typename Set>
  __device__ void run(const Set& set, float count) const {
    const float m = CENTERED ? mean[set.number] : 0.0f, scale = inverse[set.number];
    float sum = 0.0f, dot = 0.0f;
    set.each([&](const auto& v, const SetPlace& p) {
      const Vec<float, N> c = set.constants(gamma, p);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float g = v.get(1, j) * c.v[j];
        sum += g;
        dot = fmaf(g, (v.get(0, j) - m) * scale, dot);
      }
    });
    const float shift = CENTERED ? set.sum(sum) / count : 0.0f, slope = set.sum(dot) / count;
    set.each([&](const auto& v, const SetPlace& p) {
      const Vec<float, N> c = set.constants(gamma, p);
      float result[N];
#pragma unroll
      for (int j = 0; j < N; ++j)
        result[j] = scale * (v.get(1, j) * c.v[j] - shift - (v.get(0, j) - m) * scale * slope) +
                    (ADD ? v.get(OPERANDS - 1, j) : 0.0f);
      store_floats(dx + p.at, result);
    });
  }
};

// Operands of the reductions to the gradients of scale and shift: normalized elements, and dy; mean null: not centred.
// PIXELWISE: the elements of a vector belong to one set, whose constants are fetched with them, so that rows in flight
// do not wait for one another.
template <typename T, bool PIXELWISE>
struct NormalizedSource {
  static constexpr int OPERANDS = 2;
  const T *x, *dy;
  const float *mean, *inverse;
  NormSets sets;
  Reciprocal channels;

  template <int N>
  struct OfPixel {
    Held<T, N> dy, x;
    float mean, inverse;
  };
  template <int N>
  struct OfSets {
    Held<T, N> dy;
    float normal[N];
  };
  template <int N>
  using Fetched = std::conditional_t<PIXELWISE, OfPixel<N>, OfSets<N>>;
  bool vectorizable() const { return aligned(x, 16) && aligned(dy, 16); }
  template <int N>
  __device__ auto fetch(int64_t at) const {
    Fetched<N> f;
    f.dy = hold<N>(dy + at);
    const Held<T, N> v = hold<N>(x + at);
    if constexpr (PIXELWISE) {
      const int64_t set = channels(at);
      f.x = v;
      f.mean = mean ? mean[set] : 0.0f;
      f.inverse = inverse[set];
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t set = sets.set_of(at, j);
        f.normal[j] = (to_float(v[j]) - mean[set]) * inverse[set];
      }
    }
    return f;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>&, const Of&, int64_t) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const {
    if constexpr (PIXELWISE)
      return (to_float(f.x[j]) - f.mean) * f.inverse;
    else
      return f.normal[j];
  }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const { return to_float(f.dy[j]); }
};

// The reductions of batch normalization, over elements that are normalized already; dbeta null: not computed.
struct NormalizedReduction : BnBackwardReduction {
  __device__ Channel load(int64_t) const { return 0.0f; }
  __device__ Prior prior(int64_t c) const {
    return {1.0f, accumulate ? dgamma[c] : 0.0f, accumulate && dbeta ? dbeta[c] : 0.0f};
  }
  __device__ void keep(int64_t c, const Gradients& gradients) const {
    dgamma[c] = gradients.dgamma;
    if (dbeta) dbeta[c] = gradients.dbeta;
  }
  __device__ void finish(int64_t c, const Prior& prior, const Total& total) const {
    keep(c, {static_cast<float>(static_cast<double>(prior.dgamma) + total.dot),
             static_cast<float>(static_cast<double>(prior.dbeta) + total.sum)});
  }
};

}  // namespace mbc

// These three launchers are those of group and of layer normalization (`groups` is 0).
extern "C" const char* mbc_group_norm(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  const auto at = operands_of_group_norm(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSets<T, true>{{at.x.as<T>()}, at.y.as<T>(), at.gamma, at.beta, at.mean, at.inverse, eps(call, 0)});
  });
  return launched();
}

extern "C" const char* mbc_group_norm_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  const auto at = operands_of_group_norm_backward(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSetsBackward<T, true, false>{{at.x.as<T>(), at.dy.as<T>()}, at.dx.as<T>(), at.mean, at.inverse,
                                                          at.gamma});
  });
  return launched();
}

extern "C" const char* mbc_group_norm_backward_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormReduceArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[6] : nullptr;
  const NormSets sets(a);
  const NormalizedReduction reduction{{nullptr, nullptr, out<float>(call, 4), out<float>(call, 5), 0.0f, a.accumulate}};
  MBC_FOR_TYPE(a.type, T, {
    const T *x = in<T>(call, 0), *dy = in<T>(call, 1);
    const float *mean = in<float>(call, 2), *inverse = in<float>(call, 3);
    if (sets.pixelwise)
      reduce_rows_of<T>(call.stream, a.rows * a.inner, a.channels, a.parts,
                        NormalizedSource<T, true>{x, dy, mean, inverse, sets, Reciprocal(a.channels)}, workspace, reduction);
    else
      reduce_channels_of<T>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts,
                            NormalizedSource<T, false>{x, dy, mean, inverse, sets, {}}, workspace, reduction);
  });
  return launched();
}

extern "C" const char* mbc_layer_norm_backward_add(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSetsBackward<T, true, true>{{in<T>(call, 0), in<T>(call, 1), in<T>(call, 5)}, out<T>(call, 6),
                                                         in<float>(call, 2), in<float>(call, 3), in<float>(call, 4)});
  });
  return launched();
}

extern "C" const char* mbc_rms_norm(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSets<T, false>{{in<T>(call, 0)}, out<T>(call, 2), in<float>(call, 1), nullptr, nullptr,
                                            out<float>(call, 3), eps(call, 0)});
  });
  return launched();
}

extern "C" const char* mbc_rms_norm_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSetsBackward<T, false, false>{{in<T>(call, 0), in<T>(call, 1)}, out<T>(call, 4), nullptr,
                                                           in<float>(call, 2), in<float>(call, 3)});
  });
  return launched();
}

extern "C" const char* mbc_rms_norm_backward_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormReduceArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[4] : nullptr;
  const NormalizedReduction reduction{{nullptr, nullptr, out<float>(call, 3), nullptr, 0.0f, a.accumulate}};
  MBC_FOR_TYPE(a.type, T, {
    reduce_rows_of<T>(call.stream, a.rows * a.inner, a.channels, a.parts,
                      NormalizedSource<T, true>{in<T>(call, 0), in<T>(call, 1), nullptr, in<float>(call, 2), NormSets(a),
                                                Reciprocal(a.channels)},
                      workspace, reduction);
  });
  return launched();
}
