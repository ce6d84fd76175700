// Gradients of the image of convolutions of one place (see mbc_pointwise.cuh), by themselves and with sums of batch
// normalisation's backward pass over what comes of them.
#include "mbc_pointwise.cuh"

extern "C" const char* mbc_pointwise_backward_data(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<PointwiseArguments>(call, [&](auto of) {
    using T = decltype(of);
    run_pointwise<true>(call, out<T>(call, 2), InMemory<T, false, false>{}, NoSums{}, nullptr);
  });
}
