// Mean and biased variance of every channel of a convolution's result, whose epilogue has summed up its elements and
// their squares. Accesses: sums (those of the squares come behind), mean, variance.

#include "device.cuh"

struct MomentsRow {
  int64_t channels;
  int64_t count;  // elements of a channel
};

namespace mbc {

// A mean far from zero makes the variance a small difference of large numbers: the rounding of the sums, which are in
// fp32, counts for more then, and in fp64 none is added to it.
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
