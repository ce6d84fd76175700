// Two products of convolutions of one place in a launch (see conv1x1.cuh): what sums of batch normalisation's
// backward pass are over, made again from its image, and the gradient of the image of the convolution that comes
// behind. Neither is written.
#include "conv1x1_backward_data.cuh"

extern "C" const char* mbc_pointwise_pair_relu_sums(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, false, false>(call);
}
extern "C" const char* mbc_pointwise_pair_relu_sums_signed(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, false, true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, true, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_sums_signed(const MbcCall& call) {
  return mbc::gradient_relu_sums<mbc::Makes::BOTH, true, true>(call);
}
// `_signed`: where a plan has the signs of what is made again they are not read, since the launch has them at hand.
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_signed(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, false>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, true>(call);
}
extern "C" const char* mbc_pointwise_pair_add_relu_and_sums_of_two_signed(const MbcCall& call) {
  return mbc::gradient_add_relu_and_sums<mbc::Makes::BOTH, true>(call);
}
