// Mean and biased variance of every channel of a convolution's result, from the sums of its elements and of their
// squares that the convolution's epilogue computed. Accesses: sums (followed by the sums of squares), mean, variance.

#include "device.cuh"

struct MomentsRow {
  int64_t channels;
  int64_t count;  // elements of a channel
};

namespace mbc {

// With a mean far from zero, the variance is a small difference of large numbers, and the rounding of the fp32 sums
// counts for more. The arithmetic here is in fp64, so that it adds no further rounding error.
__global__ void moments(const float* sums, float* mean, float* variance, int64_t channels, double count) {
  for (int64_t c = thread_index(); c < channels; c += thread_count()) {
    const double middle = sums[c] / count, spread = sums[channels + c] / count - middle * middle;
    mean[c] = static_cast<float>(middle);
    variance[c] = static_cast<float>(spread < 0.0 ? 0.0 : spread);
  }
}

}  // namespace mbc

extern "C" const char* mbc_moments(const MbcCall& call) {
  using namespace mbc;
  const auto& row = arguments<MomentsRow>(call);
  MBC_LAUNCH(moments, blocks_for(row.channels), THREADS, call.stream, in<float>(call, 0), out<float>(call, 1),
             out<float>(call, 2), row.channels, static_cast<double>(row.count));
  return launched();
}
