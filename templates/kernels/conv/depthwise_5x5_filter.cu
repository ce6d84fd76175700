// Gradient of depthwise 5 x 5 filters, by the kernel of depthwise_rows_filter.cuh.
//
// Bytes      image and gradient in, once each; 25 sums a channel out, in parts.
// Tile       two channels of 2 x 7 pixels of the gradient a thread, of 2 x 4 at a stride of 2.
// Limit      memory bandwidth and fp32 arithmetic about equally.
#include "depthwise_rows_filter.cuh"

extern "C" const char* mbc_depthwise_5x5_backward_filter(const MbcCall& call) {
  return mbc::run_depthwise_rows_filter<mbc::RowsFilter<2, 1, 5, 5, 2, 7>, mbc::RowsFilter<2, 2, 5, 5, 2, 4>>(call);
}
