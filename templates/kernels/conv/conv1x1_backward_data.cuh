// Reductions of batch normalization's backward pass over the gradient through ReLU, which follows from the data
// gradient of a 1x1 convolution in the same launch (see conv1x1.cuh). x, the reductions' other operand, is read, or
// recomputed by a second GEMM of the launch (X_AND_GRADIENT).
#pragma once

#include "conv1x1.cuh"

namespace mbc {

// The gradient is the sum of two (ADD). ReLU's backward pass reads its output or its bit mask (BITMASK).
template <GemmResult M, bool ADD, bool BITMASK, typename O>
const char* run_gradient_relu_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    const ReluBackwardSource<T, ADD, true, Relu> source{{at.relu}, nullptr, at.dy2, at.x, at.d};
    return run_conv1x1<M, T>(call, nullptr, source, sums_of(at, eps(call, 0)), at.workspace);
  });
}

template <GemmResult M, typename O>
const char* run_gradient_add_relu_remat(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const NormalizeAddRelu f{normalize(at, eps(call, 0))};
    const RematAddReluSource<T, true, NormalizeAddRelu> source(at.r, nullptr, at.dy2, at.x, at.d, at.y, f);
    const RematReduction<NormalizeAddRelu> sums(sums_of(at, eps(call, 1)), f);
    return run_conv1x1<M, T>(call, nullptr, source, sums, at.workspace);
  });
}

}  // namespace mbc
