// Convolutions with windows of any size and stride along one to three axes, in bf16 and fp16, channels last, by mma.sync:
// forward, alone or with batch statistics in the epilogue, and data gradients at a stride of one.
//
// GEMM       M = output pixels, N = filters, K = filter taps x channels (mma_conv.cuh). Windows are never written: each
//            stage copies the channels of the pixels under one tap. A data gradient reads gradients, by reversed taps.
// Tile       128 pixels x 128 or 64 filters, four warps, m16n8k16 in bf16 or fp16, stages of K = 32.
// Bytes      image and weights in, the result out; the pixels of overlapping windows come from the L2 cache.
// Limit      tensor cores.
#include "implicit_gemm.cuh"
#include "implicit_gemm_operands.h"
#include "mma_conv.cuh"
#include "batch_statistics.cuh"

namespace mbc {

template <GemmResult M, typename T, typename R>
void run_implicit_gemm(const MbcCall& call, const R& r, typename R::State* partial) {
  const auto& a = arguments<ImplicitGemmArguments>(call);
  using Gemm = MmaGemm<T, WindowPixels, COMPUTES_GRADIENT<M>>;
  const WindowPixels window(a);
  const MmaGemms<Gemm> gemms{{in<T>(call, 0), in<T>(call, 1), window, window.channels, narrow(a.filters)}};
  run_mma_conv<M>(call.stream, window.pixels, a.filters, a.blocks, gemms, out<T>(call, 2), TensorSource<T, false, false>{}, r,
                  partial);
}

template <GemmResult M>
const char* run_implicit_gemm(const MbcCall& call) {
  return on_tensor_cores<ImplicitGemmArguments>(
      call, [&](auto of) { run_implicit_gemm<M, decltype(of)>(call, NoReduction{}, nullptr); });
}

}  // namespace mbc

extern "C" const char* mbc_implicit_gemm(const MbcCall& call) {
  return mbc::run_implicit_gemm<mbc::GemmResult::X>(call);
}
extern "C" const char* mbc_implicit_gemm_backward_data(const MbcCall& call) {
  return mbc::run_implicit_gemm<mbc::GemmResult::GRADIENT>(call);
}
extern "C" const char* mbc_implicit_gemm_statistics(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<ImplicitGemmArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto at = operands_of_implicit_gemm_statistics(call);
    const EpilogueStatistics<T> statistics{{nullptr, 0, at.mean, at.variance}};
    run_implicit_gemm<GemmResult::X, T>(call, statistics, at.workspace);
  });
}
