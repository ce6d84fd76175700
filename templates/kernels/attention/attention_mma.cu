// Scaled dot-product attention in 16 bits on tensor cores, channels last, up to 128 channels a head.
//
// GEMM       as in attention.cu, by mma.sync m16n8k16: sums in fp32; probabilities and their gradients are rounded to
//            16 bits in registers between two products.
// Tile       a block holds 64 rows and walks over 64 positions at a time (32 from 96 channels on); 4 warps of 16 rows
//            each.
// Shared     15,360 to 53,248 bytes, a row padded by 16 bytes, so that no two words that a warp reads together share a
//            bank. Copied by cp.async; values, which are read along their columns, by ldmatrix.trans.
// Registers  as in attention.cu, and the scores of 16 x 64 or 16 x 32, twice backward.
// Limit      latency of copies, which the blocks of a multiprocessor hide from each other; exponentials.
#include "attention.cuh"
#include "attention_mma_operands.h"
#include "mma.cuh"

namespace mbc {

template <typename T>
struct MmaUnit {
  using Element = T;
  static constexpr int WIDTH = 8;  // elements of a copy of 16 bytes
  template <int D>
  static constexpr int stride = D + 8;
  template <int D>
  static constexpr int warps = 4;
  template <int D>
  static constexpr int walked = D <= 64 ? 64 : 32;

  static __device__ void copy(T* to, const T* from, bool there) {
    cp_async_16(reinterpret_cast<uint4*>(to), from, there);
  }
  static __device__ void arrive() {
    cp_async_commit();
    cp_async_wait<0>();
  }
  static __device__ uint32_t word(const T* at) { return *reinterpret_cast<const uint32_t*>(at); }

  template <int D, int N>
  static __device__ void dot(float (&sums)[N][4], const T* a, const T* b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const T *upper = a + g * stride<D> + 2 * t, *lower = upper + 8 * stride<D>;
    const T* column = b + g * stride<D> + 2 * t;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const uint32_t left[4] = {word(upper + d), word(lower + d), word(upper + d + 8), word(lower + d + 8)};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const T* right = column + 8 * n * stride<D> + d;
        mma_m16n8k16<T>(sums[n], left, word(right), word(right + 8));
      }
    }
  }
  template <int D, int N>
  static __device__ void mix(float (&sums)[D / 8][4], const float (&p)[N][4], const T* b) {
    const int lane = threadIdx.x % 32;
    // Of the four matrices of 8 x 8 that one ldmatrix reads, the first two are one below the other.
    const T* row = b + (lane / 8 % 2 * 8 + lane % 8) * stride<D> + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint32_t left[4] = {rounded_word<T>(p[n]), rounded_word<T>(p[n] + 2), rounded_word<T>(p[n + 1]),
                                rounded_word<T>(p[n + 1] + 2)};
#pragma unroll
      for (int d = 0; d < D; d += 16) {
        uint32_t right[4];
        ldmatrix_x4_trans(right, reinterpret_cast<const uint4*>(row + 8 * n * stride<D> + d));
        mma_m16n8k16<T>(sums[d / 8], left, right[0], right[1]);
        mma_m16n8k16<T>(sums[d / 8 + 1], left, right[2], right[3]);
      }
    }
  }
};

}  // namespace mbc

extern "C" const char* mbc_attention_mma(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<AttentionArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<AttentionArguments>(call);
    const auto at = operands_of_attention_mma(call);
    for_depth<128>(a.depth, [&](auto d) { run_attend<MmaUnit<T>, T, d()>(call, a, at); });
  });
}

extern "C" const char* mbc_attention_mma_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<AttentionArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<AttentionArguments>(call);
    const auto at = operands_of_attention_mma_backward(call);
    for_depth<128>(a.depth, [&](auto d) { run_backward<MmaUnit<T>, T, d()>(call, a, at); });
  });
}

extern "C" const char* mbc_attention_mma_backward_bias(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<AttentionBiasArguments>(call, [&](auto of) {
    using T = decltype(of);
    const auto& a = arguments<AttentionBiasArguments>(call);
    const auto at = operands_of_attention_mma_backward_bias(call);
    for_depth<128>(a.depth, [&](auto d) { run_bias_gradient<MmaUnit<T>, T, d()>(call, a, at); });
  });
}
