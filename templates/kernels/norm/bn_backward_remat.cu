// Reductions of batch normalization's backward pass over the gradient through ReLU, which recompute and store ReLU's
// output for later readers (fused rematerialization), equal to the bit to that of the forward kernels.
//
// Bytes      x, the residual, and the gradient (or two that are added) in; ReLU's output, the gradient through ReLU and
//            two sums for each channel out. A separate launch for ReLU's output would read most of that a second time.
// Reduction  `parts` blocks write partial sums, a second kernel merges them in order, in fp64 (channel_reduce.cuh).
// Threads    256. With channels last a thread keeps 16 bytes of channels and walks down the rows.
// Shared     constants of a block's channels, and the partial sums of its threads.
// Limit      memory bandwidth.
#include "batch_norm_relu.cuh"
#include "bn_backward_remat_operands.h"

namespace mbc {

// F computes y from x and the residual r. ADD: the gradient is the sum of two.
template <bool ADD, typename F>
const char* remat_sums(const MbcCall& call, const BnBackwardRematOperands& at, const F& f, float eps) {
  const auto& a = arguments<FusedSumArguments>(call);
  const RematReduction<F> sums(sums_of(at, eps, a.accumulate), f);
  MBC_FOR_TYPE(a.type, T, {
    const RematAddReluSource<T, ADD, F> source(at.r, at.dy, at.dy2, at.x, at.d, at.y, f);
    reduce_image<T>(call, a, source, at.workspace, sums);
  });
  return launched();
}

template <bool ADD>
const char* normalize_add_relu_and_sums(const MbcCall& call, const BnBackwardRematOperands& at) {
  return remat_sums<ADD>(call, at, NormalizeAddRelu{normalize(at, eps(call, 0))}, eps(call, 1));
}

template <bool ADD>
const char* normalize_twice_add_relu_and_sums(const MbcCall& call, const BnBackwardRematOperands& at) {
  const NormalizeTwiceAddRelu f{normalize(at, eps(call, 0)), second_normalize(at, eps(call, 1))};
  return remat_sums<ADD>(call, at, f, eps(call, 2));
}

}  // namespace mbc

extern "C" const char* mbc_batch_normalize_relu_remat_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FusedSumArguments>(call);
  const auto at = operands_of_batch_normalize_relu_remat_bn_reduce(call);
  const Normalize forward = normalize(at, eps(call, 0));
  const BnBackwardReduction sums = sums_of(at, eps(call, 1), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    const RematReluSource<T> source({at.x, at.dy}, at.y, NormalizeRelu{forward});
    reduce_image<T>(call, a, source, at.workspace, BnReluBackwardReduction<T>(sums, forward));
  });
  return launched();
}
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
MBC_LAUNCHER(batch_normalize_add_relu_remat_bn_reduce, normalize_add_relu_and_sums<false>)
MBC_LAUNCHER(batch_normalize_add_relu_remat_bn_reduce_two_grads, normalize_add_relu_and_sums<true>)
MBC_LAUNCHER(dual_batch_normalize_add_relu_remat_bn_reduce, normalize_twice_add_relu_and_sums<false>)
MBC_LAUNCHER(dual_batch_normalize_add_relu_remat_bn_reduce_two_grads, normalize_twice_add_relu_and_sums<true>)
