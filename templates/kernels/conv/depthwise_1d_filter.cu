// Gradient of depthwise 1 x K and K x 1 filters, K up to 11, by the kernel of depthwise_rows_filter.cuh.
//
// Bytes      image and gradient in, once each; K sums a channel out, in parts.
// Tile       two channels of 2 x 7 pixels of the gradient a thread for a row (of 2 x 4 at a stride of 2), of 7 x 2 for
//            a column; all 11 sums are computed, and K of them are stored.
// Limit      memory bandwidth.
#include "depthwise_rows_filter.cuh"

namespace mbc {

template <int S>
using OneRow = RowsFilter<DEPTHWISE_PAIR, S, 1, DEPTHWISE_LINES, 2, S == 1 ? 7 : 4>;
template <int S>
using OneColumn = RowsFilter<DEPTHWISE_PAIR, S, DEPTHWISE_LINES, 1, 7, 2>;

}  // namespace mbc

extern "C" const char* mbc_depthwise_1d_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const bool row = arguments<DepthwiseRowsArguments>(call).kernel_height == 1;
  return row ? run_depthwise_rows_filter<OneRow<1>, OneRow<2>>(call)
             : run_depthwise_rows_filter<OneColumn<1>, OneColumn<2>>(call);
}
