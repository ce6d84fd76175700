// Depthwise 7 x 7 convolutions and their data gradients, by the kernels of depthwise_rows.cuh.
//
// Bytes      image in, result out, once each.
// Tile       two channels of 4 x 7 pixels a thread; at a stride of 2, of 2 x 4 output or 2 x 8 image pixels.
// Limit      fp32 arithmetic.
#include "depthwise_rows.cuh"

extern "C" const char* mbc_depthwise_7x7(const MbcCall& call) {
  return mbc::run_depthwise_rows<mbc::DepthwiseFilterRows<7, 7, true>>(call);
}

extern "C" const char* mbc_depthwise_7x7_backward_data(const MbcCall& call) {
  return mbc::run_depthwise_rows<mbc::DepthwiseFilterRows<7, 7, true>, true>(call);
}
