// Reductions of batch normalization's backward pass over the gradient through ReLU, which follows from the data
// gradient of a 1x1 convolution in the same launch (see conv1x1.cuh). x, the reductions' other operand, is read, or
// recomputed by a second GEMM of the launch (X_AND_GRADIENT).
#pragma once

#include "conv1x1.cuh"

namespace mbc {

// Image and weights of x if it is recomputed; gradient and weights.
template <GemmResult M>
constexpr int GEMM_OPERANDS = 2 * GEMMS<M>;

// Accesses after those: a second gradient (ADD), ReLU's output or its bit mask (BITMASK), x if it is read, mean,
// variance; the gradient through ReLU, dgamma, dbeta, workspace.
template <GemmResult M, bool ADD, bool BITMASK>
const char* run_gradient_relu_reduction(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int MORE = GEMM_OPERANDS<M>, RELU = MORE + ADD, X = RELU + 1, MEAN = COMPUTES_X<M> ? X : X + 1;
    constexpr int D = MEAN + 2;
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    using ReluOperand = std::conditional_t<BITMASK, uint8_t, T>;
    const T *addend = ADD ? in<T>(call, MORE) : nullptr, *x = COMPUTES_X<M> ? nullptr : in<T>(call, X);
    const ReluBackwardSource<T, ADD, true, Relu> source{{in<ReluOperand>(call, RELU)}, nullptr, addend, x, out<T>(call, D)};
    const BnBackwardReduction sums = sums_of(call, MEAN, D + 1, eps(call, 0));
    return run_conv1x1<M, T>(call, nullptr, source, sums, out<BnBackwardReduction::State>(call, D + 3));
  });
}

// Accesses after those: x if it is read, mean, variance, scale and shift if there are any, r, a second gradient; the
// recomputed output of ReLU, the gradient through ReLU, dgamma, dbeta, workspace.
template <GemmResult M>
const char* run_gradient_add_relu_remat(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int X = GEMM_OPERANDS<M>, MEAN = COMPUTES_X<M> ? X : X + 1;
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const int r = MEAN + (affine ? 4 : 2), y = r + 2;
    const T* x = COMPUTES_X<M> ? nullptr : in<T>(call, X);
    const NormalizeAddRelu f{normalize(call, MEAN, affine, eps(call, 0))};
    const RematAddReluSource<T, true, NormalizeAddRelu> source(in<T>(call, r), nullptr, in<T>(call, r + 1), x,
                                                               out<T>(call, y + 1), out<T>(call, y), f);
    const RematReduction<NormalizeAddRelu> sums(sums_of(call, MEAN, y + 2, eps(call, 1)), f);
    return run_conv1x1<M, T>(call, nullptr, source, sums, out<BnBackwardReduction::State>(call, y + 4));
  });
}

}  // namespace mbc
