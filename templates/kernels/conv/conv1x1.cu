// 1x1 convolutions at a stride of one, in bf16 and fp16, channels last: alone, with batch statistics in the epilogue,
// and recomputed inside the reductions of batch normalisation's backward pass, which write what is recomputed or keep
// it inside.
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two that write and reduce), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      alone: pixels and weights are read, the result is written. With a reduction what it needs besides
//            (gradients, ReLU's output or its bit mask) is read as well, and the masked gradient is written.
#include "conv1x1.cuh"
#include "batch_statistics.cuh"

namespace mbc {

// Behind image and weights come `operands` of the gradient, mean and variance; x if it is written, what else `made`
// says, dgamma, dbeta, workspace.
template <Makes M, typename T, typename S>
void run_conv1x1_sums(const MbcCall& call, const S& source, int operands, int made) {
  const int mean = 2 + operands, x = mean + 2, dgamma = x + (M == Makes::X) + made;
  run_conv1x1<M>(call, M == Makes::X ? out<T>(call, x) : nullptr, source, sums_of(call, mean, dgamma, eps(call, 0)),
                   out<Sums::State>(call, dgamma + 2));
}

// Of the gradient through relu, by its output or its bit mask (BITMASK), which is written as well; ADD: of a sum of
// two. Operands are those two and what tells ReLU, otherwise ReLU's output and the gradient, or the gradient and the
// mask.
template <Makes M, bool ADD, bool BITMASK>
const char* conv1x1_relu_sums(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int DY = ADD || BITMASK ? 2 : 3, RELU = ADD ? 4 : BITMASK ? 3 : 2, D = 6 + ADD + (M == Makes::X);
    using Relu = std::conditional_t<BITMASK, ByMask, ByOutput<T>>;
    using Told = std::conditional_t<BITMASK, uint8_t, T>;
    const T* more = ADD ? in<T>(call, DY + 1) : nullptr;
    const Behind<T, ADD, true, Relu> source{{in<Told>(call, RELU)}, in<T>(call, DY), more, nullptr, out<T>(call, D)};
    run_conv1x1_sums<M, T>(call, source, 2 + ADD, 1);
  });
}

// Accesses: image, weights, mean, variance, scale and shift if there are, r, one gradient or two, x, y, d, dgamma,
// dbeta, workspace.
template <bool ADD>
const char* run_conv1x1_of_both(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const NormalizeAddRelu f{normalize(call, 2, affine, eps(call, 0))};
    const int r = affine ? 6 : 4, x = r + (ADD ? 3 : 2);
    const RematBehind<T, ADD, NormalizeAddRelu> source(in<T>(call, r), in<T>(call, r + 1),
                                                       ADD ? in<T>(call, r + 2) : nullptr, nullptr,
                                                       out<T>(call, x + 2), out<T>(call, x + 1), f);
    const Sums sums = sums_of(call, 2, x + 3, eps(call, 1));
    run_conv1x1<Makes::X>(call, out<T>(call, x), source, SumsBeside<NormalizeAddRelu>(sums, f),
                            out<Sums::State>(call, x + 5));
  });
}

}  // namespace mbc

extern "C" const char* mbc_conv1x1(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    run_conv1x1<Makes::X>(call, out<T>(call, 2), InMemory<T, false, false>{}, NoReduction{}, nullptr);
  });
}
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_conv1x1_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const StatisticsOfMade<T> statistics{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}};
    run_conv1x1<Makes::X>(call, out<T>(call, 2), InMemory<T, false, false>{}, statistics,
                            out<typename Statistics<T>::State>(call, 5));
  });
}
extern "C" const char* mbc_conv1x1_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    run_conv1x1_sums<Makes::X, T>(call, InMemory<T, true, false>{{nullptr, in<T>(call, 2)}}, 1, 0);
  });
}
extern "C" const char* mbc_conv1x1_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X, false, false>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X, true, false>(call);
}
extern "C" const char* mbc_conv1x1_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X, false, true>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X, true, true>(call);
}
// `inside`: what the convolution makes is read nowhere else.
extern "C" const char* mbc_conv1x1_unstored_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X_INSIDE, false, false>(call);
}
extern "C" const char* mbc_conv1x1_unstored_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X_INSIDE, false, true>(call);
}
extern "C" const char* mbc_conv1x1_unstored_add_relu_backward_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X_INSIDE, true, false>(call);
}
extern "C" const char* mbc_conv1x1_unstored_add_relu_backward_masked_bn_reduce(const MbcCall& call) {
  return mbc::conv1x1_relu_sums<mbc::Makes::X_INSIDE, true, true>(call);
}
// `_masked`: where a plan has the bit mask of what is recomputed it is not read, since the launch computes it anyway.
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce(const MbcCall& call) {
  return mbc::run_conv1x1_of_both<false>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce_masked(const MbcCall& call) {
  return mbc::run_conv1x1_of_both<false>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce_two_grads(const MbcCall& call) {
  return mbc::run_conv1x1_of_both<true>(call);
}
extern "C" const char* mbc_conv1x1_add_relu_remat_bn_reduce_two_grads_masked(const MbcCall& call) {
  return mbc::run_conv1x1_of_both<true>(call);
}
