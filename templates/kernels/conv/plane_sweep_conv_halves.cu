// Data gradient that sweeps planes (plane_sweep_conv.cuh), of a concatenation of two equal halves: in two tensors.
//
// GEMM       tile, warps, shared memory and registers are those of plane_sweep_conv.cuh.
// Threads    a consumer thread stores four neighbouring filters of a voxel, which lie in one half.
// Limit      tensor cores.
#include "plane_sweep_conv.cuh"

namespace mbc {

// An epilogue that stores half of the filters in a tensor of its own.
template <typename T>
struct StoreHalves {
  static constexpr int TABLE_BYTES = 0;
  T* halves[2];
  int32_t half;  // filters

  template <int UNITS>
  struct Thread {
    const StoreHalves f;
    const int32_t first;

    __device__ Thread(const StoreHalves& f_, char*, int64_t, int32_t filter) : f(f_), first(filter) {}
    // An element at `offset` of the concatenation: 2 half for each voxel before, and `first`.
    __device__ T* target(T*, int64_t offset, int unit) const {
      const int32_t filter = first + unit * 16;
      const int64_t before = (offset - first) / 2;
      return filter < f.half ? f.halves[0] + before + filter : f.halves[1] + before + filter - f.half;
    }
    __device__ void fetch(const StoreHalves&, int64_t, const int32_t (&)[2]) {}
    __device__ void push(const StoreHalves&, const uint32_t (&)[2 * UNITS], int) {}
    __device__ void finish(const StoreHalves&, int64_t, int32_t) const {}
  };
};

}  // namespace mbc

// Accesses: gradient of the result, weights, the two slices of the data gradient.
extern "C" const char* mbc_plane_sweep_conv_halves(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<PlaneSweepHalvesArguments>(call);
    T *const first = out<T>(call, 2), *const second = out<T>(call, 3);
    const StoreHalves<T> epilogue{{a.swapped ? second : first, a.swapped ? first : second}, narrow(a.filters / 2)};
    return run_plane_sweep(call, a, first, epilogue);
  });
}
