// Depthwise 1 x K and K x 1 convolutions, K up to 11, and their data gradients, by the kernels of depthwise_rows.cuh.
//
// Bytes      image in, result out, once each.
// Tile       two channels of 4 x 7 pixels a thread (1 x K: 2 x 7); at a stride of 2, of 2 x 4 output or 2 x 8 image pixels.
// Limit      memory bandwidth.
#include "depthwise_rows.cuh"

namespace mbc {

using OneRow = DepthwiseFilterRows<DEPTHWISE_LINES, 1, false>;
using OneColumn = DepthwiseFilterRows<1, DEPTHWISE_LINES, true>;

}  // namespace mbc

extern "C" const char* mbc_depthwise_1d(const MbcCall& call) {
  using namespace mbc;
  const bool row = arguments<DepthwiseRowsArguments>(call).kernel_height == 1;
  return row ? run_depthwise_rows<OneRow>(call) : run_depthwise_rows<OneColumn>(call);
}

extern "C" const char* mbc_depthwise_1d_backward_data(const MbcCall& call) {
  using namespace mbc;
  const bool row = arguments<DepthwiseRowsArguments>(call).kernel_height == 1;
  return row ? run_depthwise_rows<OneRow, true>(call) : run_depthwise_rows<OneColumn, true>(call);
}
