// The reductions of batch normalization over the whole mini-batch, in fp32 whatever the storage type: statistics, and
// the two sums of the backward pass (dgamma, dbeta).
//
// Statistics of each sample by itself (instance normalization) are the same reduction with a block for each sample.
//
// Bytes      statistics: x in. Backward reductions: x and the gradient in. Each is one pass over memory.
// Reduction  `parts` blocks for each tile of channels write a partial state each, a second kernel merges them in order,
//            in fp64 (channel_reduce.cuh). `parts` is part of the plan: results do not depend on the GPU. Variances are
//            computed from shifted data and merged after Chan, Golub and LeVeque (batch_statistics.cuh).
// Threads    256. With channels last a thread keeps 16 bytes of channels and walks down the rows; with channels first
//            a block has one channel.
// Shared     constants of a block's channels (mean, scale and so on), and the partial states of its threads.
// Limit      memory bandwidth; with small tensors the launches, see batch_norm_single_launch.cu.
#include "batch_norm.cuh"
#include "channels.cuh"
#include "batch_statistics.cuh"
#include "batch_norm_operands.h"
#include "batch_norm_arguments.h"
#include "concat_arguments.h"

namespace mbc {

struct Pair {
  float *mean, *variance;
};

// Statistics of a part of a concatenation; those of the other channels are copied in the same launch.
template <typename T>
struct StatisticsAndCopy : Statistics<T> {
  Pair from, to;
  int64_t joined, channels;

  StatisticsAndCopy(const Statistics<T>& own, Pair from_, Pair to_, int64_t joined_, int64_t channels_)
      : Statistics<T>(own), from(from_), to(to_), joined(joined_), channels(channels_) {}
  // Called by one thread for each channel.
  __device__ float prior(int64_t c) const {
#pragma unroll 8
    for (int64_t i = c; i < joined; i += channels) {
      to.mean[i] = from.mean[i];
      to.variance[i] = from.variance[i];
    }
    return Statistics<T>::prior(c);
  }
};

struct Pairs {
  static constexpr int MANY = 32;  // most pairs of a launch
  Pair from[MANY];
  int64_t first[MANY], channels[MANY];
};

__global__ void concat_statistics(Pairs pairs, Pair to) {
  const Pair from = pairs.from[blockIdx.y];
  const int64_t first = pairs.first[blockIdx.y], channels = pairs.channels[blockIdx.y];
  for (int64_t i = thread_index(); i < channels; i += thread_count()) {
    to.mean[first + i] = from.mean[i];
    to.variance[first + i] = from.variance[i];
  }
}

}  // namespace mbc

extern "C" const char* mbc_batch_statistics(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[3] : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    const Statistics<T> statistics{x, a.layout == MBC_CHANNELS_LAST ? 1 : a.inner, out<float>(call, 1),
                                   out<float>(call, 2)};
    reduce_image<T>(call, a, TensorSource<T, false, false>{{x, nullptr}}, workspace, statistics);
  });
  return launched();
}

extern "C" const char* mbc_instance_statistics(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  const auto at = operands_of_instance_statistics(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* x = at.x;
    const Statistics<T> alone{x, a.layout == MBC_CHANNELS_LAST ? 1 : a.inner, at.mean, at.variance};
    reduce_channels_of<T>(call.stream, a.layout, 1, a.channels, a.inner, a.parts, TensorSource<T, false, false>{{x, nullptr}},
                          at.workspace, SampleStatistics<T>{alone, a.channels, a.channels * a.inner}, a.rows);
  });
  return launched();
}

extern "C" const char* mbc_batch_statistics_concat(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<StatisticsAndCopyArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[5] : nullptr;
  float *mean = out<float>(call, 3), *variance = out<float>(call, 4);
  const int64_t own = a.before ? a.joined : 0, others = a.before ? 0 : a.channels;
  const Pair from{out<float>(call, 1), out<float>(call, 2)}, to{mean + others, variance + others};
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    const Statistics<T> alone{x, a.layout == MBC_CHANNELS_LAST ? 1 : a.inner, mean + own, variance + own};
    reduce_image<T>(call, a, TensorSource<T, false, false>{{x, nullptr}}, workspace,
                    StatisticsAndCopy<T>(alone, from, to, a.joined, a.channels));
  });
  return launched();
}

extern "C" const char* mbc_concat_statistics(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConcatStatisticsArguments>(call);
  const int64_t* channels = behind<ConcatStatisticsArguments>(call);
  const auto at = operands_of_concat_statistics(call);
  int64_t first = 0;
  for (int64_t pair = 0; pair < a.pairs;) {
    Pairs pairs{};
    unsigned many = 0;
    int64_t most = 0;
    for (; pair < a.pairs && many < Pairs::MANY; ++pair, ++many) {
      pairs.from[many] = {at.statistics[2 * pair], at.statistics[2 * pair + 1]};
      pairs.first[many] = first;
      pairs.channels[many] = channels[pair];
      first += channels[pair];
      most = most < channels[pair] ? channels[pair] : most;
    }
    const dim3 grid(blocks_for(most), many);
    MBC_LAUNCH(concat_statistics, grid, THREADS, call.stream, pairs, Pair{at.mean, at.variance});
  }
  return launched();
}

extern "C" const char* mbc_batch_normalize_backward_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  const auto at = operands_of_batch_normalize_backward_reduce(call);
  const BnBackwardReduction sums = sums_of(at, eps(call, 0), a.accumulate);
  MBC_FOR_TYPE(a.type, T, {
    reduce_image<T>(call, a, TensorSource<T, true, false>{{at.x, at.dy}}, at.workspace, sums);
  });
  return launched();
}
