// 1x1 convolutions by mma.sync, for GPUs without wgmma: see mma_conv.cuh.
#pragma once

#include "mma_conv.cuh"
#include "conv1x1_launches.cuh"

namespace mbc {

// The form of a 1x1 convolution by mma.sync, for conv1x1_launches.cuh.
struct Conv1x1Mma {
  // The GEMM whose pixels and weights are operands `first` and `first + 1`.
  template <bool BACKWARD, typename T>
  static MmaGemm<T, PointPixels, BACKWARD> gemm(const MbcCall& call, int first, int64_t channels) {
    const auto& a = arguments<Conv1x1Arguments>(call);
    const PointPixels pixels{narrow(a.pixels), narrow(channels)};
    return {in<T>(call, first), in<T>(call, first + 1), pixels, narrow(channels), narrow(a.filters)};
  }

  // `output`: where the result is stored, or null. Returns null: nothing fails before the launch.
  template <GemmResult M, typename T, typename S, typename R>
  static const char* run(const MbcCall& call, T* output, const S& source, const R& r, typename R::State* partial) {
    const auto& a = arguments<Conv1x1Arguments>(call);
    const auto launch = [&](const auto& gemms) {
      run_mma_conv<M>(call.stream, a.pixels, a.filters, a.blocks, gemms, output, source, r, partial);
    };
    const auto first = gemm<M == GemmResult::GRADIENT, T>(call, 0, a.channels);
    if constexpr (M == GemmResult::X_AND_GRADIENT) {
      const auto second = gemm<true, T>(call, 2, arguments<DualConv1x1Arguments>(call).gradient_channels);
      launch(MmaGemms<decltype(first), decltype(second)>{first, second});
    } else {
      launch(MmaGemms<decltype(first)>{first});
    }
    return nullptr;
  }
};

}  // namespace mbc
