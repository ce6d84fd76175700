// Launches of 1x1 convolutions at a stride of one, in bf16 and fp16, channels last: alone, with batch statistics in the
// epilogue, or inside the reductions of batch normalization's backward pass. FORM is one of the two forms of the GEMM:
// Conv1x1Wgmma (conv1x1.cuh) or Conv1x1Mma (conv1x1_mma.cuh).
#pragma once

#include "batch_statistics.cuh"
#include "mma.cuh"
#include "smem_operands.cuh"
#include "conv1x1_arguments.h"
#include "conv1x1_bn_backward_arguments.h"
#include "dual_conv1x1_arguments.h"

namespace mbc {

template <typename FORM, GemmResult M>
const char* run_conv1x1(const MbcCall& call) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    return FORM::template run<M>(call, out<T>(call, 2), TensorSource<T, false, false>{}, NoReduction{}, nullptr);
  });
}

template <typename FORM, typename O>
const char* run_conv1x1_statistics(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const EpilogueStatistics<T> statistics{{nullptr, 0, at.mean, at.variance}};
    return FORM::template run<GemmResult::X, T>(call, at.x, TensorSource<T, false, false>{}, statistics, at.workspace);
  });
}

// Reductions over x, the result of the convolution, and its gradient.
template <typename FORM, GemmResult M, typename O>
const char* run_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const TensorSource<T, true, false> source{{nullptr, at.dy}};
    T* stored = nullptr;
    if constexpr (M == GemmResult::X) stored = at.x;
    return FORM::template run<M>(call, stored, source, sums_of(at, eps(call, 0)), at.workspace);
  });
}

// Reductions over x and the sum of two gradients through ReLU, by ReLU's output or its bit mask (BITMASK); the gradient
// through ReLU is written as well.
template <typename FORM, GemmResult M, bool BITMASK, typename O>
const char* run_add_relu_backward_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    const ReluBackwardSource<T, true, true, Relu> source{{at.relu}, at.dy, at.dy2, nullptr, at.d};
    return FORM::template run<M, T>(call, at.x, source, sums_of(at, eps(call, 0)), at.workspace);
  });
}

// Reductions over x and its gradient through a recomputed normalization and ReLU.
template <typename FORM, typename O>
const char* run_bn_relu_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1RematArguments>(call, [&](auto of) {
    using T = decltype(of);
    const BnReluBackwardReduction<T> sums(sums_of(at, eps(call, 1)), normalize(at, eps(call, 0)));
    const TensorSource<T, true, false> source{{nullptr, at.dy}};
    return FORM::template run<GemmResult::X_NOT_STORED, T>(call, nullptr, source, sums, at.workspace);
  });
}

// The gradient of x, which is the result of a convolution that is recomputed.
template <typename FORM, typename T, typename O, typename F>
const char* run_map(const MbcCall& call, const O& at, const F& f) {
  const MapSource<T, F> source({nullptr, at.dy}, at.dx, f);
  return FORM::template run<GemmResult::X_NOT_STORED, T>(call, nullptr, source, ChannelMap<F>{f}, nullptr);
}
template <typename FORM, typename O>
const char* run_bn_backward(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    const int64_t count = arguments<Conv1x1BnBackwardArguments>(call).count;
    return run_map<FORM, decltype(of)>(call, at, normalize_backward(at, eps(call, 0), count));
  });
}
template <typename FORM, typename O>
const char* run_bn_relu_backward(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    using T = decltype(of);
    const int64_t count = arguments<Conv1x1BnBackwardArguments>(call).count;
    const NormalizeBackward backward = normalize_backward(at, eps(call, 1), count);
    return run_map<FORM, T>(call, at, NormalizeReluBackward<T>{normalize(at, eps(call, 0)), backward});
  });
}

// Reductions over the gradient through ReLU, which follows from the data gradient of a convolution in the same launch. x,
// the reductions' other operand, is read, or recomputed by a second GEMM of the launch (X_AND_GRADIENT). The gradient is
// the sum of two (ADD).
template <typename FORM, GemmResult M, bool ADD, bool BITMASK, typename O>
const char* run_gradient_relu_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    using Relu = std::conditional_t<BITMASK, ReluByMask, ReluByOutput<T>>;
    const ReluBackwardSource<T, ADD, true, Relu> source{{at.relu}, nullptr, at.dy2, at.x, at.d};
    return FORM::template run<M, T>(call, nullptr, source, sums_of(at, eps(call, 0)), at.workspace);
  });
}

template <typename FORM, typename O>
const char* run_gradient_bn_relu_reduction(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const BnReluBackwardReduction<T> sums(sums_of(at, eps(call, 1)), normalize(at, eps(call, 0)));
    const TensorSource<T, true, false> source{{at.x, nullptr}};
    return FORM::template run<GemmResult::GRADIENT, T>(call, at.dx, source, sums, at.workspace);
  });
}

template <typename FORM, GemmResult M, typename O>
const char* run_gradient_add_relu_remat(const MbcCall& call, const O& at) {
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    using T = decltype(of);
    const NormalizeAddRelu f{normalize(at, eps(call, 0))};
    const RematAddReluSource<T, true, NormalizeAddRelu> source(at.r, nullptr, at.dy2, at.x, at.d, at.y, f);
    const RematReduction<NormalizeAddRelu> sums(sums_of(at, eps(call, 1)), f);
    return FORM::template run<M, T>(call, nullptr, source, sums, at.workspace);
  });
}

}  // namespace mbc
