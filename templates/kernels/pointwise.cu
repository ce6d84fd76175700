// Launches of convolutions of one place (see mbc_pointwise.cuh): by themselves, with batch statistics of what they
// make, and along with sums of batch normalisation's backward pass.
#include "mbc_pointwise.cuh"
#include "mbc_statistics.cuh"

namespace mbc {

// Behind image and weights come `operands` of the gradient, mean and variance; x, what else `made` says, dgamma, dbeta,
// workspace.
template <typename T, typename S>
void run_pointwise_sums(const MbcCall& call, const S& source, int operands, int made) {
  const int mean = 2 + operands, x = mean + 2, dgamma = x + 1 + made;
  const Sums sums{in<float>(call, mean), in<float>(call, mean + 1), out<float>(call, dgamma),
                  out<float>(call, dgamma + 1), eps(call, 0), 0};
  run_pointwise<false>(call, out<T>(call, x), source, sums, out<Sums::State>(call, dgamma + 2));
}

// Of the gradient through relu, which is written on the way; ADD: of a sum of two.
template <typename T, bool ADD, typename Relu>
void run_pointwise_behind(const MbcCall& call, const Relu& relu, int gradient, int d) {
  const T* more = ADD ? in<T>(call, gradient + 1) : nullptr;
  const Behind<T, ADD, true, Relu> source{relu, in<T>(call, gradient), more, nullptr, out<T>(call, d)};
  run_pointwise_sums<T>(call, source, ADD ? 3 : 2, 1);
}

// Accesses: image, weights, mean, variance, scale and shift if there are, r, one gradient or two, x, y, d, dgamma,
// dbeta, workspace.
template <bool ADD>
const char* run_pointwise_of_both(const MbcCall& call) {
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    const bool affine = arguments<PointwiseAlongArguments>(call).affine;
    const NormalizeAddRelu f{normalize(call, 2, affine, eps(call, 0))};
    const int r = affine ? 6 : 4, x = r + (ADD ? 3 : 2);
    const AlongBehind<T, ADD, NormalizeAddRelu> source(in<T>(call, r), in<T>(call, r + 1),
                                                       ADD ? in<T>(call, r + 2) : nullptr, nullptr,
                                                       out<T>(call, x + 2), out<T>(call, x + 1), f);
    const Sums sums{in<float>(call, 2), in<float>(call, 3), out<float>(call, x + 3), out<float>(call, x + 4),
                    eps(call, 1), 0};
    run_pointwise<false>(call, out<T>(call, x), source, SumsBeside<NormalizeAddRelu>(sums, f),
                         out<Sums::State>(call, x + 5));
  });
}

}  // namespace mbc

extern "C" const char* mbc_pointwise(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise<false>(call, out<T>(call, 2), InMemory<T, false, false>{}, NoSums{}, nullptr);
  });
}
// Accesses: image, weights, result, mean, variance, workspace.
extern "C" const char* mbc_pointwise_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    const StatisticsOfMade<T> statistics{{nullptr, 0, out<float>(call, 3), out<float>(call, 4)}};
    run_pointwise<false>(call, out<T>(call, 2), InMemory<T, false, false>{}, statistics,
                         out<typename Statistics<T>::State>(call, 5));
  });
}
extern "C" const char* mbc_pointwise_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_sums<T>(call, InMemory<T, true, false>{{nullptr, in<T>(call, 2)}}, 1, 0);
  });
}
extern "C" const char* mbc_pointwise_relu_backward_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_behind<T, false>(call, ByOutput<T>{in<T>(call, 2)}, 3, 7);
  });
}
extern "C" const char* mbc_pointwise_add_relu_backward_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise_behind<T, true>(call, ByOutput<T>{in<T>(call, 4)}, 2, 8);
  });
}
extern "C" const char* mbc_pointwise_relu_backward_signs_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    run_pointwise_behind<decltype(of), false>(call, BySigns{in<uint8_t>(call, 3)}, 2, 7);
  });
}
extern "C" const char* mbc_pointwise_add_relu_backward_signs_sums(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    run_pointwise_behind<decltype(of), true>(call, BySigns{in<uint8_t>(call, 4)}, 2, 8);
  });
}
// `_signed`: where a plan has the signs of what is made again they are not read, since the launch has them at hand.
extern "C" const char* mbc_pointwise_add_relu_and_sums(const MbcCall& call) {
  return mbc::run_pointwise_of_both<false>(call);
}
extern "C" const char* mbc_pointwise_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::run_pointwise_of_both<false>(call);
}
extern "C" const char* mbc_pointwise_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::run_pointwise_of_both<true>(call);
}
extern "C" const char* mbc_pointwise_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::run_pointwise_of_both<true>(call);
}
