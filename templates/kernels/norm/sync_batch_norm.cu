// Synchronized batch normalization: combines the statistics of all ranks, each of its own rows, after a gather. Every
// rank computes the same values from the same operands in the same order, so that all have the same bits.
//
// Bytes      two vectors, each [ranks, channels] of fp32 in and [channels] out: mean and variance, or the two reductions
//            of the backward pass.
// Reduction  over ranks in their order, in fp64, by one thread for each channel. Variances are merged after Chan, Golub
//            and LeVeque, from distances of the means from that of the first rank.
// Threads    256.
// Limit      the launch.
#include "device.cuh"
#include "sync_batch_norm_arguments.h"
#include "sync_batch_norm_operands.h"

namespace mbc {

constexpr int MOST_RANKS = 256;

// The share of the mini-batch that each rank has.
struct Shares {
  double of[MOST_RANKS];
};

__global__ void combine_statistics(const float* means, const float* variances, float* mean, float* variance, Shares share,
                                   int64_t ranks, int64_t channels) {
  for (int64_t c = thread_index(); c < channels; c += thread_count()) {
    const double first = means[c];
    double from_first = 0;
    for (int64_t r = 0; r < ranks; ++r) from_first += share.of[r] * (means[r * channels + c] - first);
    double spread = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const double distance = means[r * channels + c] - first - from_first;
      spread += share.of[r] * (variances[r * channels + c] + distance * distance);
    }
    mean[c] = static_cast<float>(first + from_first);
    variance[c] = static_cast<float>(spread);
  }
}

struct Gathered {
  static constexpr int MOST = 4;  // most operands of a launch
  const float* from[MOST];
  float* to[MOST];
};

__global__ void sum_gathered(Gathered operands, int64_t ranks, int64_t elements) {
  const float* from = operands.from[blockIdx.y];
  float* to = operands.to[blockIdx.y];
  for (int64_t i = thread_index(); i < elements; i += thread_count()) {
    double sum = 0;
    for (int64_t r = 0; r < ranks; ++r) sum += from[r * elements + i];
    to[i] = static_cast<float>(sum);
  }
}

}  // namespace mbc

extern "C" const char* mbc_combine_statistics(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CombineStatisticsArguments>(call);
  const int64_t* counts = behind<CombineStatisticsArguments>(call);
  if (a.ranks > MOST_RANKS) return "there are more ranks than the kernel takes";
  double all = 0;
  for (int64_t r = 0; r < a.ranks; ++r) all += static_cast<double>(counts[r]);
  Shares share{};
  for (int64_t r = 0; r < a.ranks; ++r) share.of[r] = static_cast<double>(counts[r]) / all;
  MBC_LAUNCH(combine_statistics, blocks_for(a.channels), THREADS, call.stream, in<float>(call, 0), in<float>(call, 1),
             out<float>(call, 2), out<float>(call, 3), share, a.ranks, a.channels);
  return launched();
}

extern "C" const char* mbc_sum_gathered(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumGatheredArguments>(call);
  const auto at = operands_of_sum_gathered(call);
  for (int64_t first = 0; first < a.operands; first += Gathered::MOST) {
    Gathered operands{};
    unsigned many = 0;
    for (; many < Gathered::MOST && first + many < a.operands; ++many) {
      operands.from[many] = at.gathered[first + many];
      operands.to[many] = at.sums[first + many];
    }
    const dim3 grid(blocks_for(a.elements), many);
    MBC_LAUNCH(sum_gathered, grid, THREADS, call.stream, operands, a.ranks, a.elements);
  }
  return launched();
}
