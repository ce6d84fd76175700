// Backward pass of batch normalisation over what a 1x1 convolution made, which is recomputed inside, in the same order
// of additions, and neither read nor written (fused rematerialization): its reductions, and the gradient of x.
//
// The kernel is in conv1x1.cuh: M = pixels, N = filters, K = channels; a tile of 64 pixels x 128 filters, five
// warpgroups (producer, two consumers, two that write and reduce), wgmma m64n128k16 in bf16 or fp16. Limit: bytes, not
// tensor cores.
//
// Bytes      image, weights and the gradient behind are read; the reductions write two sums a channel, the other pass
//            the gradient of x.
#include "conv1x1.cuh"

namespace mbc {

// Of accesses that have mean and variance of x at `mean`, its scale at `gamma` if `affine`, and the sums at `dgamma`.
inline NormalizeBackward normalize_backward(const MbcCall& call, int mean, bool affine, int gamma, int dgamma,
                                            float eps) {
  const auto& a = arguments<Conv1x1BnBackwardArguments>(call);
  return {in<float>(call, mean), in<float>(call, mean + 1), in<float>(call, dgamma), in<float>(call, dgamma + 1),
          affine ? in<float>(call, gamma) : nullptr, eps, static_cast<float>(a.count)};
}

template <typename T, typename F>
void apply_backward(const MbcCall& call, int gradient, int dx, const F& f) {
  const MapSource<T, F> source({nullptr, in<T>(call, gradient)}, out<T>(call, dx), f);
  run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, ChannelMap<F>{f}, nullptr);
}

template <typename T, typename R>
void run_reduction(const MbcCall& call, int gradient, int workspace, const R& sums) {
  const TensorSource<T, true, false> source{{nullptr, in<T>(call, gradient)}};
  run_conv1x1<GemmResult::X_NOT_STORED, T>(call, nullptr, source, sums, out<BnBackwardReduction::State>(call, workspace));
}

}  // namespace mbc

// Accesses: image, weights, gradient, mean, variance, dgamma, dbeta, gamma if there is one; dx.
extern "C" const char* mbc_pointwise_normalize_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    const bool affine = arguments<Conv1x1BnBackwardArguments>(call).affine;
    apply_backward<decltype(of)>(call, 2, affine ? 8 : 7, normalize_backward(call, 3, affine, 7, 5, eps(call, 0)));
  });
}
// Accesses: image, weights, mean, variance, scale and shift if there are, the gradient behind relu, dgamma, dbeta; dx.
extern "C" const char* mbc_pointwise_normalize_relu_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1BnBackwardArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1BnBackwardArguments>(call).affine;
    const int dy = affine ? 6 : 4;
    const Normalize forward = normalize(call, 2, affine, eps(call, 0));
    const NormalizeBackward backward = normalize_backward(call, 2, affine, 4, dy + 1, eps(call, 1));
    apply_backward<T>(call, dy, dy + 3, NormalizeReluBackward<T>{forward, backward});
  });
}
// Accesses: image, weights, mean, variance, scale and shift if there are, the gradient behind relu; dgamma, dbeta,
// workspace.
extern "C" const char* mbc_pointwise_normalize_relu_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1RematArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<Conv1x1RematArguments>(call).affine;
    const int dy = affine ? 6 : 4;
    const Normalize forward = normalize(call, 2, affine, eps(call, 0));
    run_reduction<T>(call, dy, dy + 3, BnReluBackwardReduction<T>(sums_of(call, 2, dy + 1, eps(call, 1)), forward));
  });
}
// Accesses: image, weights, gradient, mean, variance; dgamma, dbeta, workspace.
extern "C" const char* mbc_pointwise_normalize_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<Conv1x1Arguments>(call, [&](auto of) {
    run_reduction<decltype(of)>(call, 2, 7, sums_of(call, 3, 5, eps(call, 0)));
  });
}
