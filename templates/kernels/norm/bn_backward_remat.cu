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
#include "bn_backward_remat_arguments.h"

namespace mbc {

template <typename T, typename S, typename R>
void remat_sum(const MbcCall& call, const S& source, int workspace, const R& r) {
  const auto& a = arguments<BnBackwardRematArguments>(call);
  reduce_channels_of<T>(call.stream, a.layout, a.rows, a.channels, a.inner, a.parts, source,
                        a.parts > 1 ? call.pointers[workspace] : nullptr, r);
}

// Sums of the first batch normalization, with dgamma and dbeta from `out_index` on.
inline BnBackwardReduction sums_of_first(const MbcCall& call, int out_index, float eps) {
  return {in<float>(call, 1), in<float>(call, 2), out<float>(call, out_index), out<float>(call, out_index + 1), eps,
          arguments<BnBackwardRematArguments>(call).accumulate};
}

// F computes y from x and operand `residual`. The gradient, or the two gradients that are added, come after `operands`
// operands.
template <bool ADD, typename F>
const char* remat_sums(const MbcCall& call, const F& f, int residual, int operands, float eps) {
  const auto& a = arguments<BnBackwardRematArguments>(call);
  const int y = operands + (ADD ? 2 : 1);
  const RematReduction<F> sums(sums_of_first(call, y + 2, eps), f);
  MBC_FOR_TYPE(a.type, T, {
    const RematAddReluSource<T, ADD, F> source(in<T>(call, residual), in<T>(call, operands),
                                        ADD ? in<T>(call, operands + 1) : nullptr, in<T>(call, 0), out<T>(call, y + 1),
                                        out<T>(call, y), f);
    remat_sum<T>(call, source, y + 4, sums);
  });
  return launched();
}

template <bool ADD>
const char* normalize_add_relu_and_sums(const MbcCall& call) {
  const auto& a = arguments<BnBackwardRematArguments>(call);
  const int r = a.affine ? 5 : 3;
  return remat_sums<ADD>(call, NormalizeAddRelu{normalize(call, 1, a.affine, eps(call, 0))}, r, r + 1, eps(call, 1));
}

template <bool ADD>
const char* normalize_twice_add_relu_and_sums(const MbcCall& call) {
  const auto& a = arguments<BnBackwardRematArguments>(call);
  const int second = a.affine ? 5 : 3;
  const NormalizeTwiceAddRelu f{normalize(call, 1, a.affine, eps(call, 0)),
                                normalize(call, second + 1, a.affine2, eps(call, 1))};
  return remat_sums<ADD>(call, f, second, second + (a.affine2 ? 5 : 3), eps(call, 2));
}

}  // namespace mbc

extern "C" const char* mbc_batch_normalize_relu_remat_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<BnBackwardRematArguments>(call);
  const int dy = a.affine ? 5 : 3;
  const Normalize forward = normalize(call, 1, a.affine, eps(call, 0));
  const BnBackwardReduction sums = sums_of_first(call, dy + 2, eps(call, 1));
  MBC_FOR_TYPE(a.type, T, {
    const RematReluSource<T> source({in<T>(call, 0), in<T>(call, dy)}, out<T>(call, dy + 1), NormalizeRelu{forward});
    remat_sum<T>(call, source, dy + 4, BnReluBackwardReduction<T>(sums, forward));
  });
  return launched();
}
// Groups that have the bit mask of a recomputed value (`_masked`) use these launchers, too: the mask is recomputed with
// the value, and not read.
extern "C" const char* mbc_batch_normalize_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::normalize_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_batch_normalize_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::normalize_add_relu_and_sums<true>(call);
}
extern "C" const char* mbc_dual_batch_normalize_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::normalize_twice_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_dual_batch_normalize_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::normalize_twice_add_relu_and_sums<true>(call);
}
