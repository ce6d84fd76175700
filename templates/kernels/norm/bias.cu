// The gradient of a bias, which is the sum of a channel (also of a slice of a wider tensor, which is copied in the same
// launch).
//
// Bytes      the gradient in; with a slice, the slice out, too.
// Reduction  `parts` blocks write a sum each, a second kernel adds them in order, in fp64 (channel_reduce.cuh).
// Threads    256. With channels last a thread keeps 16 bytes of channels and walks down the rows; with channels first a
//            block of the gradient has one channel.
// Limit      memory bandwidth.
#include "channel_sum.cuh"
#include "concat_arguments.h"

namespace mbc {

// Reads a slice of a wider tensor, and stores it.
template <typename T>
struct SliceSource {
  static constexpr int OPERANDS = 1;
  const T* wide;
  Slice slice;
  T* y;

  template <int N>
  using Fetched = Held<T, N>;
  bool vectorizable() const { return aligned(wide, 16) && aligned(y, 16) && slice.gap % WIDTH<T> == 0; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const { return hold<N>(wide + slice(at)); }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>& f, const Of&, int64_t at) const { store_held(y + at, f); }
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const { return to_float(f[j]); }
  template <int N>
  __device__ float second(const Fetched<N>&, int) const { return 0.0f; }
};

}  // namespace mbc

extern "C" const char* mbc_channel_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[2] : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const TensorSource<T, false, false> source{{in<T>(call, 0), nullptr}};
    reduce_image<T>(call, a, source, workspace, ChannelSum{out<float>(call, 1), a.accumulate});
  });
  return launched();
}

extern "C" const char* mbc_channel_slice_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SliceSumArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[3] : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    const T* wide = in<T>(call, 0) + a.start * (a.layout == MBC_CHANNELS_LAST ? 1 : a.inner);
    const SliceSource<T> source{wide, {a.layout, a.channels, a.all, a.inner}, out<T>(call, 1)};
    reduce_image<T>(call, a, source, workspace, ChannelSum{out<float>(call, 2), a.accumulate});
  });
  return launched();
}
