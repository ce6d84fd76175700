// Gradients of the image of convolutions of one place (see mbc_pointwise.cuh): by themselves, and on the way to the
// sums of batch normalisation's backward pass over what relu lets through of them.
#include "mbc_pointwise.cuh"

namespace mbc {

template <typename T, typename S, typename R>
void run_gradient(const MbcCall& call, T* product, const S& source, const R& r, int dgamma) {
  run_pointwise<Makes::GRADIENT>(call, product, source, r, out<Sums::State>(call, dgamma + 2));
}

// Accesses: gradient, weights, what is added to the product if anything is (ADD), relu's output or its signs, x, mean,
// variance; the gradient through relu, dgamma, dbeta, workspace.
template <bool ADD, bool SIGNS>
const char* data_relu_sums(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int RELU = ADD ? 3 : 2, X = RELU + 1, D = X + 3;
    const T *more = ADD ? in<T>(call, 2) : nullptr, *x = in<T>(call, X);
    using Relu = std::conditional_t<SIGNS, BySigns, ByOutput<T>>;
    using Told = std::conditional_t<SIGNS, uint8_t, T>;
    const Behind<T, ADD, true, Relu> source{{in<Told>(call, RELU)}, nullptr, more, x, out<T>(call, D)};
    run_gradient<T>(call, nullptr, source, sums_of(call, X + 1, D + 1, eps(call, 0)), D + 1);
  });
}

// Accesses: gradient, weights, x, mean, variance, scale and shift if there are; the product, dgamma, dbeta, workspace.
// ALONG: behind the product relu's output is written.
template <bool ALONG>
const char* data_normalize_relu_sums(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<PointwiseAlongArguments>(call).affine;
    const int product = affine ? 7 : 5, dgamma = product + (ALONG ? 2 : 1);
    const Normalize forward = normalize(call, 3, affine, eps(call, 0));
    const ReluSums<T> sums(sums_of(call, 3, dgamma, eps(call, 1)), forward);
    const Operands<T> x{in<T>(call, 2), nullptr};
    if constexpr (ALONG)
      run_gradient(call, out<T>(call, product), AlongX<T>(x, out<T>(call, product + 1), NormalizeRelu{forward}), sums,
                   dgamma);
    else
      run_gradient(call, out<T>(call, product), InMemory<T, true, false>{x}, sums, dgamma);
  });
}

// Accesses: gradient, weights, x, mean, variance, scale and shift if there are, r, what is added to the product if
// anything is; relu's output, the gradient through it, dgamma, dbeta, workspace.
template <bool ADD>
const char* data_add_relu_and_sums(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<PointwiseAlongArguments>(call).affine;
    const int r = affine ? 7 : 5, y = r + (ADD ? 2 : 1);
    const NormalizeAddRelu f{normalize(call, 3, affine, eps(call, 0))};
    const AlongBehind<T, ADD, NormalizeAddRelu> source(in<T>(call, r), nullptr, ADD ? in<T>(call, r + 1) : nullptr,
                                                       in<T>(call, 2), out<T>(call, y + 1), out<T>(call, y), f);
    const SumsBeside<NormalizeAddRelu> sums(sums_of(call, 3, y + 2, eps(call, 1)), f);
    run_gradient<T>(call, nullptr, source, sums, y + 2);
  });
}

}  // namespace mbc

extern "C" const char* mbc_pointwise_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise<Makes::GRADIENT>(call, out<T>(call, 2), InMemory<T, false, false>{}, NoSums{}, nullptr);
  });
}
extern "C" const char* mbc_pointwise_data_relu_sums(const MbcCall& call) {
  return mbc::data_relu_sums<false, false>(call);
}
extern "C" const char* mbc_pointwise_data_relu_sums_signed(const MbcCall& call) {
  return mbc::data_relu_sums<false, true>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_sums(const MbcCall& call) {
  return mbc::data_relu_sums<true, false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_sums_signed(const MbcCall& call) {
  return mbc::data_relu_sums<true, true>(call);
}
extern "C" const char* mbc_pointwise_data_normalize_relu_sums(const MbcCall& call) {
  return mbc::data_normalize_relu_sums<false>(call);
}
extern "C" const char* mbc_pointwise_data_normalize_relu_and_sums(const MbcCall& call) {
  return mbc::data_normalize_relu_sums<true>(call);
}
// `_signed`: where a plan has the signs of what is made again they are not read, since the launch has them at hand.
extern "C" const char* mbc_pointwise_data_add_relu_and_sums(const MbcCall& call) {
  return mbc::data_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::data_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::data_add_relu_and_sums<true>(call);
}
extern "C" const char* mbc_pointwise_data_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::data_add_relu_and_sums<true>(call);
}
