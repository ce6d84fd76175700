// Gradient of depthwise 7 x 7 filters, by the kernel of depthwise_rows_filter.cuh.
//
// Bytes      image and gradient in, once each; 49 sums a channel out, in parts.
// Tile       one channel of 7 x 7 pixels of the gradient a thread, of 4 x 4 at a stride of 2.
// Limit      fp32 arithmetic.
#include "depthwise_rows_filter.cuh"

extern "C" const char* mbc_depthwise_7x7_backward_filter(const MbcCall& call) {
  return mbc::run_depthwise_rows_filter<mbc::RowsFilter<1, 1, 7, 7, 7, 7>, mbc::RowsFilter<1, 2, 7, 7, 4, 4>>(call);
}
