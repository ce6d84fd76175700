// Convolutions with windows of any size and stride along one to three axes, in bf16 and fp16, channels last, by mma.sync:
// forward, alone or with batch statistics in the epilogue, and data gradients at a stride of one.
//
// GEMM       M = output pixels, N = filters, K = filter taps x channels (mma_conv.cuh). Windows are never written: each
//            stage copies the channels of the pixels under one tap. A data gradient reads gradients, by reversed taps.
// Tile       128 pixels x 128 or 64 filters, eight warps, m16n8k16 in bf16 or fp16, three stages of K = 32.
// Bytes      image and weights in, the result out; the pixels of overlapping windows come from the L2 cache.
// Limit      tensor cores, or the L2 cache: a tile of 128 filters reads 16 KiB for 1 MFLOP, one of 64 filters 24 KiB.
#include "implicit_gemm_arguments.h"
#include "implicit_gemm_operands.h"
#include "mma_conv.cuh"
#include "batch_statistics.cuh"

namespace mbc {

// One axis of the convolution that a launch computes.
struct WindowAxis {
  int32_t size, output, kernel, stride, pad;

  WindowAxis(int64_t size_, int64_t output_, int64_t kernel_, int64_t stride_, int64_t pad_)
      : size(narrow(size_)), output(narrow(output_)), kernel(narrow(kernel_)), stride(narrow(stride_)), pad(narrow(pad_)) {}
  // Position of the first tap of an output position; a bit for each tap that is inside.
  __device__ int32_t first(int32_t at) const { return at * stride - pad; }
  __device__ uint32_t inside(int32_t first) const {
    const int32_t from = max(-first, 0), to = min(size - first, kernel);
    return from < to ? (1u << to) - (1u << from) : 0;
  }
};

// Pixels of windows, for mma_gemm.cuh.
struct WindowPixels {
  static constexpr int BITS = 10;  // most taps along an axis, as in mbc/kernels/cuda/conv/implicit_gemm.py
  struct Pixel {
    int32_t first;  // element under the first tap, which may be outside the image
    uint32_t inside;
    __device__ bool reaches(const KPosition& k) const {
      return (inside >> k.x & inside >> (BITS + k.y) & inside >> (2 * BITS + k.z) & 1) != 0;
    }
  };
  int32_t pixels, channels;
  WindowAxis z, y, x;

  explicit WindowPixels(const ImplicitGemmArguments& a)
      : pixels(narrow(a.pixels)), channels(narrow(a.channels)),
        z(a.depth, a.out_depth, a.kernel_depth, a.stride_depth, a.pad_depth),
        y(a.height, a.out_height, a.kernel_height, a.stride_height, a.pad_height),
        x(a.width, a.out_width, a.kernel_width, a.stride_width, a.pad_width) {}
  __host__ __device__ int32_t taps() const { return z.kernel * y.kernel * x.kernel; }
  __device__ Pixel locate(int32_t pixel) const {
    if (pixel >= pixels) return {0, 0};
    const int32_t line = pixel / x.output, plane = line / y.output, image = plane / z.output;
    const int32_t at_x = x.first(pixel - line * x.output), at_y = y.first(line - plane * y.output);
    const int32_t at_z = z.first(plane - image * z.output);
    return {(((image * z.size + at_z) * y.size + at_y) * x.size + at_x) * channels,
            x.inside(at_x) | y.inside(at_y) << BITS | z.inside(at_z) << 2 * BITS};
  }
  __device__ void advance(KPosition& k) const {
    k.channel += MMA_CHANNELS;
    k.offset += MMA_CHANNELS;
    if (k.channel < channels) return;
    k.offset += channels - k.channel;
    k.channel = 0;
    ++k.tap;
    if (++k.x < x.kernel) return;
    k.x = 0;
    k.offset += (x.size - x.kernel) * channels;
    if (++k.y < y.kernel) return;
    k.y = 0;
    k.offset += (y.size - y.kernel) * x.size * channels;
    ++k.z;
  }
};

template <GemmResult M, typename T, typename R>
void run_implicit_gemm(const MbcCall& call, const R& r, typename R::State* partial) {
  const auto& a = arguments<ImplicitGemmArguments>(call);
  using Gemm = MmaGemm<T, WindowPixels, COMPUTES_GRADIENT<M>>;
  const MmaGemms<Gemm> gemms{{in<T>(call, 0), in<T>(call, 1), WindowPixels(a), narrow(a.channels), narrow(a.filters)}};
  run_mma_conv<M>(call.stream, a.pixels, a.filters, a.blocks, gemms, out<T>(call, 2), TensorSource<T, false, false>{}, r,
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
