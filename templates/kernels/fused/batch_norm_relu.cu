// Batch normalization, biases and ReLU fused with their neighbours (additions, slices), in one pass over memory.
//
// ReLU's backward pass uses its stored output, a bit mask, or its output recomputed from operands that are read anyway.
// All agree to the bit, because the forward and the backward pass compute the same expressions.
//
// Bytes      every operand in once, every result out once; a bit mask takes one bit an element.
// Kernels    maps (`map_image`, channels.cuh) and reductions (`reduce_image`, channel_reduce.cuh) instantiated
//            with the sources and functors below.
// Threads    256. With channels last a thread keeps 16 bytes of channels and walks down the rows.
// Shared     constants of a block's channels; in reductions also the partial sums of its threads.
// Registers  launch bounds: 3 or 4 blocks on a multiprocessor, by the words that a thread keeps (`blocks_per_sm`).
// Limit      memory bandwidth.
#include "channel_sum.cuh"
#include "batch_norm_relu.cuh"
#include "batch_norm_relu_operands.h"

namespace mbc {

// NormalizeReluBackward with a second gradient of x, which is added.
template <typename T>
struct NormalizeReluBackwardAdd : NormalizeReluBackward<T> {
  using Channel = typename NormalizeReluBackward<T>::Channel;
  __device__ float operator()(const Channel& c, float x, float dy, float more) const {
    return NormalizeReluBackward<T>::operator()(c, x, dy) + more;
  }
};

// The integers that follow the arguments of a launch that reads a slice: the slice, and the part of the result that is
// also stored in a tensor of its own.
struct SliceFields {
  int64_t start;
  int64_t all;  // channels of the tensor
  int64_t part_start, part_count;
};

template <typename Arguments>
const SliceFields& slice_fields(const MbcCall& call) {
  return *reinterpret_cast<const SliceFields*>(behind<Arguments>(call));
}

// The slice's first element, and its stride.
template <typename Arguments, typename T>
const T* slice_of(const MbcCall& call, const T* wide, Slice& slice) {
  const auto& a = arguments<Arguments>(call);
  const SliceFields& s = slice_fields<Arguments>(call);
  slice = Slice(a.layout, a.channels, s.all, a.inner);
  return wide + s.start * (a.layout == MBC_CHANNELS_LAST ? 1 : a.inner);
}

// A residual sum of x and r. BITMASK: the bit mask of y is written, too, channels last.
template <bool BITMASK, typename F>
const char* map_residual(const MbcCall& call, const BatchNormReluOperands& at, const F& f) {
  const auto& a = arguments<FusedMapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const Operands<T> x{at.x, at.r};
    if constexpr (BITMASK) {
      const StoreWithReluMask<T> both{at.y, at.mask};
      map_channels_to<1, false>(call.stream, a.rows * a.inner, a.channels, x, both, f);
    } else {
      map_image<1>(call, a, x, at.y.as<T>(), f);
    }
  });
  return launched();
}

inline const char* normalize_add_relu_mask(const MbcCall& call, const BatchNormReluOperands& at) {
  return map_residual<true>(call, at, NormalizeAddRelu{normalize(at, eps(call, 0))});
}

template <bool BITMASK>
const char* normalize_twice_add_relu(const MbcCall& call, const BatchNormReluOperands& at) {
  const NormalizeTwiceAddRelu f{normalize(at, eps(call, 0)), second_normalize(at, eps(call, 1))};
  return map_residual<BITMASK>(call, at, f);
}

// By ReLU's output or by its bit mask (channels last). ADD: the gradient is the sum of two.
template <bool ADD, bool BITMASK>
const char* relu_backward_bn_reduce(const MbcCall& call, const BatchNormReluOperands& at) {
  const auto& a = arguments<FusedSumArguments>(call);
  const BnBackwardReduction sums = sums_of(at, eps(call, 0), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    if constexpr (BITMASK) {
      const ReluBackwardSource<T, ADD, true, ReluByMask> source{{at.relu}, at.dy, at.dy2, at.x, at.d};
      reduce_rows_of<T>(call.stream, a.rows * a.inner, a.channels, a.parts, source, at.workspace, sums);
    } else {
      const ReluBackwardSource<T, ADD, true> source{{at.relu}, at.dy, at.dy2, at.x, at.d};
      reduce_image<T>(call, a, source, at.workspace, sums);
    }
  });
  return launched();
}

// ADD: a slice of another gradient, `wide`, is added. PART: a part of the sum is also stored in a tensor of its own.
// SLICED: the gradient of ReLU's output is a slice.
template <bool ADD, bool SLICED, bool PART = false>
const char* normalize_relu_backward(const MbcCall& call, const BatchNormReluOperands& at) {
  const auto& a = arguments<FusedMapArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const NormalizeBackward backward = normalize_backward(at, eps(call, 1), a.count);
  MBC_FOR_TYPE(a.type, T, {
    Operands<T> x{at.x, at.dy};
    T* dx = at.dx;
    const NormalizeReluBackward<T> f{forward, backward};
    if constexpr (ADD) {
      x.c = slice_of<FusedMapArguments>(call, at.wide.as<const T>(), x.slice);
      const NormalizeReluBackwardAdd<T> sum{f};
      if constexpr (PART) {
        const SliceFields& w = slice_fields<FusedMapArguments>(call);
        const StoreWithSlice<T> both{dx, at.part, w.part_start, w.part_count};
        map_channels_to<2, true>(call.stream, a.rows * a.inner, a.channels, x, both, sum);
      } else {
        map_image<2, true>(call, a, x, dx, sum);
      }
    } else {
      if constexpr (SLICED) x.b = slice_of<FusedMapArguments>(call, x.b, x.slice);
      map_image<1, SLICED>(call, a, x, dx, f);
    }
  });
  return launched();
}

template <bool SLICED>
const char* normalize_relu_sums(const MbcCall& call, const BatchNormReluOperands& at) {
  const auto& a = arguments<FusedSumArguments>(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const BnBackwardReduction sums = sums_of(at, eps(call, 1), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    Operands<T> x{at.x, at.dy};
    if constexpr (SLICED) x.b = slice_of<FusedSumArguments>(call, x.b, x.slice);
    const TensorSource<T, true, SLICED> source{x};
    reduce_image<T>(call, a, source, at.workspace, BnReluBackwardReduction<T>(sums, forward));
  });
  return launched();
}

}  // namespace mbc

MBC_LAUNCHER(batch_normalize_add_relu_mask, normalize_add_relu_mask)
MBC_LAUNCHER(dual_batch_normalize_add_relu, normalize_twice_add_relu<false>)
MBC_LAUNCHER(dual_batch_normalize_add_relu_mask, normalize_twice_add_relu<true>)

MBC_LAUNCHER(batch_normalize_relu_backward, normalize_relu_backward<false, false>)
MBC_LAUNCHER(batch_normalize_relu_backward_of_slice, normalize_relu_backward<false, true>)
MBC_LAUNCHER(batch_normalize_relu_backward_add_slice, normalize_relu_backward<true, false>)
MBC_LAUNCHER(batch_normalize_relu_backward_add_slice_and_part, normalize_relu_backward<true, false, true>)
MBC_LAUNCHER(batch_normalize_relu_bn_reduce, normalize_relu_sums<false>)
MBC_LAUNCHER(batch_normalize_relu_bn_reduce_of_slice, normalize_relu_sums<true>)
MBC_LAUNCHER(relu_backward_bn_reduce, relu_backward_bn_reduce<false, false>)
MBC_LAUNCHER(relu_backward_masked_bn_reduce, relu_backward_bn_reduce<false, true>)
MBC_LAUNCHER(add_relu_backward_bn_reduce, relu_backward_bn_reduce<true, false>)
MBC_LAUNCHER(add_relu_backward_masked_bn_reduce, relu_backward_bn_reduce<true, true>)

extern "C" const char* mbc_relu_backward_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedSumArguments>(call);
  const auto at = operands_of_relu_backward_channel_sum(call);
  const ChannelSum sum{at.sum, a.accumulate};
  MBC_FOR_TYPE(a.type, T, {
    const ReluBackwardSource<T, false, false> source{{at.relu}, at.dy, nullptr, nullptr, at.d};
    reduce_image<T>(call, a, source, at.workspace, sum);
  });
  return launched();
}
