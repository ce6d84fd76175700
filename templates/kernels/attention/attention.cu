// Scaled dot-product attention of any type, layout and size, by FMA: it is there to be always possible.
//
// GEMM       for each sample, head and group: forward M = queries, N = keys, K = channels of a head, and back; five such
//            products backward, of which the scores' and dy's with values are computed twice.
// Tile       32 or 64 rows that a block holds, 16 positions at a time that it walks over; 2 or 4 warps of 16 rows.
// Shared     8,704 to 99,840 bytes: tiles in fp32, a row padded by 16 bytes.
// Registers  the sums: 4 a thread for every 8 channels, twice in the gradients of keys and values, which spill
//            at 256 channels.
// Limit      reading shared memory: four numbers for four FMA.
#include "attention.cuh"

extern "C" const char* mbc_attention(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionArguments>(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_attend<FmaUnit, T, d()>(call, a); }); });
  return launched();
}

extern "C" const char* mbc_attention_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionArguments>(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_backward<FmaUnit, T, d()>(call, a); }); });
  return launched();
}

extern "C" const char* mbc_attention_backward_bias(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<AttentionBiasArguments>(call);
  MBC_FOR_TYPE(a.type, T, { for_depth<256>(a.depth, [&](auto d) { run_bias_gradient<FmaUnit, T, d()>(call, a); }); });
  return launched();
}
