// Backward pass of batch normalization over the result x of a 1x1 convolution: its reductions, and the gradient of x. x
// is recomputed with additions in the same order, and neither read nor written (fused rematerialization).
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two for the epilogue), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      image, weights and the gradient of the normalized x (or of ReLU's output) in; two sums for each channel,
//            or the gradient of x, out.
#include "conv1x1.cuh"

namespace mbc {

// `mean` is the access of x's mean, followed by the variance; `gamma` that of its scale if `affine`; `dgamma` that of
// the reductions.
inline NormalizeBackward normalize_backward(const MbcCall& call, int mean, bool affine, int gamma, int dgamma,
                                            float eps) {
  const auto& a = arguments<Conv1x1BnBackwardArguments>(call);
  return {in<float>(call, mean), in<float>(call, mean + 1), in<float>(call, dgamma), in<float>(call, dgamma + 1),
          affine ? in<float>(call, gamma) : nullptr, eps, static_cast<float>(a.count)};
}

template <typename T, typename F>
const char* apply_backward(const MbcCall& call, int gradient, int dx, const F& f) {
  const MapSource<T, F> source({nullptr, in<T>(call, gradient)}, out<T>(call, dx), f);
  return run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, ChannelMap<F>{f}, nullptr);
}

template <typename T, typename R>
const char* run_reduction(const MbcCall& call, int gradient, int workspace, const R& sums) {
  const TensorSource<T, true, false> source{{nullptr, in<T>(call, gradient)}};
  return run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, sums, out<BnBackwardReduction::State>(call, workspace));
}

}  // namespace mbc

// Accesses: image, weights, gradient, mean, variance, dgamma, dbeta, gamma if there is one; dx.
extern "C" const char* mbc_conv1x1_unstored_bn_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    const bool affine = arguments<Conv1x1BnBackwardArguments>(call).affine;
    return apply_backward<decltype(of)>(call, 2, affine ? 8 : 7, normalize_backward(call, 3, affine, 7, 5, eps(call, 0)));
  });
}
// Accesses: image, weights, mean, variance, scale and shift if there are any, ReLU's gradient, dgamma, dbeta; dx.
extern "C" const char* mbc_conv1x1_unstored_bn_relu_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1BnBackwardArguments>(call).affine;
    const int dy = affine ? 6 : 4;
    const Normalize forward = normalize(call, 2, affine, eps(call, 0));
    const NormalizeBackward backward = normalize_backward(call, 2, affine, 4, dy + 1, eps(call, 1));
    return apply_backward<T>(call, dy, dy + 3, NormalizeReluBackward<T>{forward, backward});
  });
}
// Accesses: image, weights, mean, variance, scale and shift if there are any, ReLU's gradient; dgamma, dbeta,
// workspace.
extern "C" const char* mbc_conv1x1_unstored_bn_relu_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1RematArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const int dy = affine ? 6 : 4;
    const Normalize forward = normalize(call, 2, affine, eps(call, 0));
    return run_reduction<T>(call, dy, dy + 3, BnReluBackwardReduction<T>(sums_of(call, 2, dy + 1, eps(call, 1)), forward));
  });
}
// Accesses: image, weights, gradient, mean, variance; dgamma, dbeta, workspace.
extern "C" const char* mbc_conv1x1_unstored_bn_reduce(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    return run_reduction<decltype(of)>(call, 2, 7, sums_of(call, 3, 5, eps(call, 0)));
  });
}
