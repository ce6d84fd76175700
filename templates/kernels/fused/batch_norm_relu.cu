// Batch normalization, biases and ReLU fused with their neighbours (additions, slices), in one pass over memory.
//
// ReLU's backward pass uses its stored output, a bit mask, or its output recomputed from operands that are read anyway.
// All agree to the bit, because the forward and the backward pass use the same functions.
//
// Bytes      every operand in once, every result out once; a bit mask takes one bit an element.
// Kernels    maps (`map_channels`, channels.cuh) and reductions (`reduce_channels_of`, channel_reduce.cuh) instantiated
//            with the sources and functors below.
// Threads    256. With channels last a thread keeps 16 bytes of channels and walks down the rows.
// Shared     constants of a block's channels; in reductions also the partial sums of its threads.
// Registers  launch bounds: 3 or 4 blocks on a multiprocessor, by the words that a thread keeps (`blocks_per_sm`).
// Limit      memory bandwidth.
#include "channel_sum.cuh"
#include "batch_norm_relu.cuh"

namespace mbc {

struct BiasRelu {
  const float* bias;
  using Channel = float;
  __device__ float load(int64_t c) const { return bias[c]; }
  __device__ float operator()(float b, float x, float) const { return relu(x + b); }
};

struct AddThree {
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float operator()(const Channel&, float a, float b, float c) const { return a + b + c; }
};

// NormalizeReluBackward with a second gradient of x, which is added.
template <typename T>
struct NormalizeReluBackwardAdd : NormalizeReluBackward<T> {
  using Channel = typename NormalizeReluBackward<T>::Channel;
  __device__ float operator()(const Channel& c, float x, float dy, float more) const {
    return NormalizeReluBackward<T>::operator()(c, x, dy) + more;
  }
};

template <int MORE, bool SLICED = false, typename T, typename F>
void map_fused(const MbcCall& call, const FusedMapArguments& a, const Operands<T>& x, T* y, F f) {
  map_channels<MORE, SLICED>(call.stream, a.layout, a.rows, a.channels, a.inner, x, y, f);
}

// The integers that follow the arguments of a launch that reads a slice: the slice, and the part of the result that is
// also stored in a tensor of its own.
struct SliceFields {
  int64_t start;
  int64_t all;  // channels of the tensor
  int64_t part_start, part_count;
};

template <typename Arguments>
const SliceFields& slice_fields(const MbcCall& call) {
  return *reinterpret_cast<const SliceFields*>(call.integers + sizeof(Arguments) / sizeof(int64_t));
}

// The slice's first element, and its stride.
template <typename Arguments, typename T>
const T* slice_of(const MbcCall& call, const T* wide, Slice& slice) {
  const auto& a = arguments<Arguments>(call);
  const SliceFields& s = slice_fields<Arguments>(call);
  slice = Slice(a.layout, a.channels, s.all, a.inner);
  return wide + s.start * (a.layout == MBC_CHANNELS_LAST ? 1 : a.inner);
}

// A residual sum of x and of operand `residual`, written to operand `y`. BITMASK: the bit mask of y is written, too,
// channels last.
template <bool BITMASK, typename F>
const char* map_residual(const MbcCall& call, int residual, int y, const F& f) {
  const auto& a = arguments<FusedMapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{in<T>(call, 0), in<T>(call, residual)};
    if constexpr (BITMASK) {
      const StoreWithReluMask<T> both{out<T>(call, y), out<uint8_t>(call, y + 1)};
      map_channels_to<1, false>(call.stream, a.rows * a.inner, a.channels, x, both, f);
    } else {
      map_fused<1>(call, a, x, out<T>(call, y), f);
    }
  });
  return launched();
}

template <bool BITMASK>
const char* normalize_add_relu(const MbcCall& call) {
  const auto& a = arguments<FusedMapArguments>(call);
  const int r = a.affine ? 5 : 3;
  return map_residual<BITMASK>(call, r, r + 1, NormalizeAddRelu{normalize(call, 1, a.affine, eps(call, 0))});
}

template <bool BITMASK>
const char* normalize_twice_add_relu(const MbcCall& call) {
  const auto& a = arguments<FusedMapArguments>(call);
  const int second = a.affine ? 5 : 3, y = second + (a.affine2 ? 5 : 3);
  const NormalizeTwiceAddRelu f{normalize(call, 1, a.affine, eps(call, 0)),
                                normalize(call, second + 1, a.affine2, eps(call, 1))};
  return map_residual<BITMASK>(call, second, y, f);
}

// By ReLU's output, an operand before the gradient, or by its bit mask (channels last), an operand after it.
template <bool ADD, bool BITMASK>
const char* relu_backward_bn_reduce(const MbcCall& call) {
  const auto& a = arguments<FusedSumArguments>(call);
  constexpr int DY = ADD || BITMASK ? 0 : 1, RELU = ADD ? 2 : 1 - DY, X = ADD ? 3 : 2, MEAN = X + 1, D = MEAN + 2;
  void* workspace = a.parts > 1 ? call.pointers[D + 3] : nullptr;
  const BnBackwardReduction sums{in<float>(call, MEAN), in<float>(call, MEAN + 1), out<float>(call, D + 1), out<float>(call, D + 2),
                  eps(call, 0), a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const T *dy = in<T>(call, DY), *addend = ADD ? in<T>(call, 1) : nullptr, *x = in<T>(call, X);
    T* d = out<T>(call, D);
    if constexpr (BITMASK) {
      const ReluBackwardSource<T, ADD, true, ReluByMask> source{{in<uint8_t>(call, RELU)}, dy, addend, x, d};
      reduce_rows_of<T>(call.stream, a.rows * a.inner, a.channels, a.parts, source, workspace, sums);
    } else {
      const ReluBackwardSource<T, ADD, true> source{{in<T>(call, RELU)}, dy, addend, x, d};
      reduce_channels_of<T>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, source, workspace, sums);
    }
  });
  return launched();
}

// ADD: a slice of another gradient is added. PART: a part of the sum is also stored in a tensor of its own. SLICED: the
// gradient of ReLU's output is a slice.
template <bool ADD, bool SLICED, bool PART = false>
const char* normalize_relu_backward(const MbcCall& call) {
  const auto& a = arguments<FusedMapArguments>(call);
  const int dy = a.affine ? 5 : 3, more = dy + 3;
  const Normalize forward = normalize(call, 1, a.affine, eps(call, 0));
  const NormalizeBackward backward{forward.mean, forward.variance, in<float>(call, dy + 1), in<float>(call, dy + 2),
                                   forward.gamma, eps(call, 1), static_cast<float>(a.count)};
  MBC_FOR_TYPE(a.type, T, {
    Operands<T> x{in<T>(call, 0), in<T>(call, dy)};
    T* dx = out<T>(call, ADD ? more + 1 : more);
    const NormalizeReluBackward<T> f{forward, backward};
    if constexpr (ADD) {
      x.c = slice_of<FusedMapArguments>(call, in<T>(call, more), x.slice);
      const NormalizeReluBackwardAdd<T> sum{f};
      if constexpr (PART) {
        const SliceFields& w = slice_fields<FusedMapArguments>(call);
        const StoreWithSlice<T> both{dx, out<T>(call, more + 2), w.part_start, w.part_count};
        map_channels_to<2, true>(call.stream, a.rows * a.inner, a.channels, x, both, sum);
      } else {
        map_fused<2, true>(call, a, x, dx, sum);
      }
    } else {
      if constexpr (SLICED) x.b = slice_of<FusedMapArguments>(call, x.b, x.slice);
      map_fused<1, SLICED>(call, a, x, dx, f);
    }
  });
  return launched();
}

template <bool SLICED>
const char* normalize_relu_sums(const MbcCall& call) {
  const auto& a = arguments<FusedSumArguments>(call);
  const int dy = a.affine ? 5 : 3;
  void* workspace = a.parts > 1 ? call.pointers[dy + 3] : nullptr;
  const Normalize forward = normalize(call, 1, a.affine, eps(call, 0));
  const BnBackwardReduction sums{forward.mean, forward.variance, out<float>(call, dy + 1), out<float>(call, dy + 2), eps(call, 1),
                  a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    Operands<T> x{in<T>(call, 0), in<T>(call, dy)};
    if constexpr (SLICED) x.b = slice_of<FusedSumArguments>(call, x.b, x.slice);
    reduce_channels<true, SLICED>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, x, workspace,
                                  BnReluBackwardReduction<T>(sums, forward));
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_batch_normalize_relu(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedMapArguments>(call);
  const NormalizeRelu f{normalize(call, 1, a.affine, eps(call, 0))};
  MBC_FOR_TYPE(a.type, T, {
    map_fused<0>(call, a, Operands<T>{in<T>(call, 0), nullptr}, out<T>(call, a.affine ? 5 : 3), f);
  });
  return launched();
}

extern "C" const char* mbc_batch_normalize_add_relu(const MbcCall& call) { return mbc::normalize_add_relu<false>(call); }
extern "C" const char* mbc_batch_normalize_add_relu_mask(const MbcCall& call) {
  return mbc::normalize_add_relu<true>(call);
}
extern "C" const char* mbc_dual_batch_normalize_add_relu(const MbcCall& call) {
  return mbc::normalize_twice_add_relu<false>(call);
}
extern "C" const char* mbc_dual_batch_normalize_add_relu_mask(const MbcCall& call) {
  return mbc::normalize_twice_add_relu<true>(call);
}

extern "C" const char* mbc_bias_add_relu(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedMapArguments>(call);
  const BiasRelu f{in<float>(call, 1)};
  MBC_FOR_TYPE(a.type, T, {
    map_fused<0>(call, a, Operands<T>{in<T>(call, 0), nullptr}, out<T>(call, 2), f);
  });
  return launched();
}

extern "C" const char* mbc_add_three(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedMapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    map_fused<2>(call, a, Operands<T>{in<T>(call, 0), in<T>(call, 1), in<T>(call, 2)}, out<T>(call, 3), AddThree{});
  });
  return launched();
}

extern "C" const char* mbc_batch_normalize_relu_backward(const MbcCall& call) {
  return mbc::normalize_relu_backward<false, false>(call);
}
extern "C" const char* mbc_batch_normalize_relu_backward_of_slice(const MbcCall& call) {
  return mbc::normalize_relu_backward<false, true>(call);
}
extern "C" const char* mbc_batch_normalize_relu_backward_add_slice(const MbcCall& call) {
  return mbc::normalize_relu_backward<true, false>(call);
}
extern "C" const char* mbc_batch_normalize_relu_backward_add_slice_and_part(const MbcCall& call) {
  return mbc::normalize_relu_backward<true, false, true>(call);
}
extern "C" const char* mbc_batch_normalize_relu_bn_reduce(const MbcCall& call) {
  return mbc::normalize_relu_sums<false>(call);
}
extern "C" const char* mbc_batch_normalize_relu_bn_reduce_of_slice(const MbcCall& call) {
  return mbc::normalize_relu_sums<true>(call);
}
extern "C" const char* mbc_relu_backward_bn_reduce(const MbcCall& call) { return mbc::relu_backward_bn_reduce<false, false>(call); }
extern "C" const char* mbc_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::relu_backward_bn_reduce<false, true>(call);
}
extern "C" const char* mbc_add_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::relu_backward_bn_reduce<true, false>(call);
}
extern "C" const char* mbc_add_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::relu_backward_bn_reduce<true, true>(call);
}

extern "C" const char* mbc_relu_backward_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedSumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[4] : nullptr;
  const ChannelSum sum{out<float>(call, 3), a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const T* none = nullptr;
    const ReluBackwardSource<T, false, false> source{{in<T>(call, 0)}, in<T>(call, 1), none, none, out<T>(call, 2)};
    reduce_channels_of<T>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, source, workspace, sum);
  });
  return launched();
}
