// Two products of convolutions of one place in a launch (see mbc_pointwise.cuh): what sums of batch normalisation's
// backward pass are over, made again from its image, and the gradient of the image of the convolution that comes
// behind. Neither is written.
#include "mbc_pointwise.cuh"

namespace mbc {

// Accesses begin with image and weights of the first product, gradient and weights of the second.
template <typename T, typename S, typename R>
void run_pair(const MbcCall& call, const S& source, const R& r, int dgamma) {
  const auto& a = arguments<PointwisePairArguments>(call);
  const Products<Makes::BOTH, T> products{
      {in<T>(call, 0), in<T>(call, 1), static_cast<int32_t>(a.channels)},
      {in<T>(call, 2), in<T>(call, 3), static_cast<int32_t>(a.gradient_channels)}};
  T* const made = nullptr;
  run_products(call, products, made, source, r, out<Sums::State>(call, dgamma + 2));
}

// Accesses behind products: what is added to the gradient if anything is (ADD), relu's output or its signs, mean,
// variance; the gradient through relu, dgamma, dbeta, workspace.
template <bool ADD, bool SIGNS>
const char* pair_relu_sums(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    constexpr int RELU = 4 + ADD, MEAN = RELU + 1, D = MEAN + 2;
    using Relu = std::conditional_t<SIGNS, BySigns, ByOutput<T>>;
    using Told = std::conditional_t<SIGNS, uint8_t, T>;
    const T* more = ADD ? in<T>(call, 4) : nullptr;
    const Behind<T, ADD, true, Relu> source{{in<Told>(call, RELU)}, nullptr, more, nullptr, out<T>(call, D)};
    run_pair<T>(call, source, sums_of(call, MEAN, D + 1, eps(call, 0)), D + 1);
  });
}

// Accesses behind products: mean, variance, scale and shift if there are, r, what is added to the gradient if anything
// is; relu's output, the gradient through it, dgamma, dbeta, workspace.
template <bool ADD>
const char* pair_add_relu_and_sums(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<PointwisePairArguments>(call).affine;
    const int r = affine ? 8 : 6, y = r + (ADD ? 2 : 1);
    const NormalizeAddRelu f{normalize(call, 4, affine, eps(call, 0))};
    const AlongBehind<T, ADD, NormalizeAddRelu> source(in<T>(call, r), nullptr, ADD ? in<T>(call, r + 1) : nullptr,
                                                       nullptr, out<T>(call, y + 1), out<T>(call, y), f);
    run_pair<T>(call, source, SumsBeside<NormalizeAddRelu>(sums_of(call, 4, y + 2, eps(call, 1)), f), y + 2);
  });
}

}  // namespace mbc

extern "C" const char* mbc_pointwise_pair_relu_sums(const MbcCall& call) {
  return mbc::pair_relu_sums<false, false>(call);
}
extern "C" const char* mbc_pointwise_pair_relu_sums_signed(const MbcCall& call) {
  return mbc::pair_relu_sums<false, true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums(const MbcCall& call) {
  return mbc::pair_relu_sums<true, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums_signed(const MbcCall& call) {
  return mbc::pair_relu_sums<true, true>(call);
}
// `_signed`: where a plan has the signs of what is made again they are not read, since the launch has them at hand.
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums(const MbcCall& call) {
  return mbc::pair_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::pair_add_relu_and_sums<false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::pair_add_relu_and_sums<true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::pair_add_relu_and_sums<true>(call);
}
