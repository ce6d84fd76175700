// Scaled dot-product attention of any type, layout and size, by FMA: it exists so that every request has a kernel.
//
// GEMM       for each sample, head and group: forward M = queries, N = keys, K = channels of a head, and back; five
//            products backward, of which two (the scores, and dy by the values) are computed twice.
// Tile       a block holds 32 or 64 rows and walks over 16 positions at a time; 2 or 4 warps of 16 rows.
// Shared     8,704 to 99,840 bytes: tiles in fp32, a row padded by 16 bytes.
// Registers  the sums: 4 a thread for every 8 channels, twice in the gradients of keys and values, which spill
//            at 256 channels.
// Limit      reading shared memory: four numbers for four FMA.
#include "attention.cuh"
#include "attention_operands.h"

extern "C" const char* mbc_attention(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionArguments>(call);
  const auto at = operands_of_attention(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_attend<FmaUnit, T, d()>(call, a, at); }); });
  return launched();
}

extern "C" const char* mbc_attention_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionArguments>(call);
  const auto at = operands_of_attention_backward(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_backward<FmaUnit, T, d()>(call, a, at); }); });
  return launched();
}

extern "C" const char* mbc_attention_backward_bias(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionBiasArguments>(call);
  const auto at = operands_of_attention_backward_bias(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_bias_gradient<FmaUnit, T, d()>(call, a, at); }); });
  return launched();
}
