// Depthwise 5 x 5 convolutions and their data gradients, by the kernels of depthwise_rows.cuh.
//
// Bytes      image in, result out, once each.
// Tile       two channels of 4 x 7 pixels a thread; at a stride of 2, of 2 x 4 output or 2 x 8 image pixels.
// Limit      memory bandwidth.
#include "depthwise_rows.cuh"

extern "C" const char* mbc_depthwise_5x5(const MbcCall& call) {
  return mbc::run_depthwise_rows<mbc::DepthwiseFilterRows<5, 5, true>>(call);
}

extern "C" const char* mbc_depthwise_5x5_backward_data(const MbcCall& call) {
  return mbc::run_depthwise_rows<mbc::DepthwiseFilterRows<5, 5, true>, true>(call);
}
