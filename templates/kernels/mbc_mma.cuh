// Tensor cores through mma.sync, from compute capability 8.0 on.
#pragma once

#include "mbc_device.cuh"

#ifdef MBC_EMULATED
#include <emulated_mma.h>
#else

namespace mbc {

// D += A B for the 32 threads of a warp together: A 16 x 16 by rows, B 16 x 8 by columns, D 16 x 8, of T and fp32.
//
// Thread (g, t) = (lane / 4, lane % 4) holds two neighbouring elements a word: of A (row, first column) (g, 2t),
// (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of B (first row, column) (2t, g), (2t + 8, g). Of D: (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1). PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <typename T>
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MBC_MMA(type)                                                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
               "{%0,%1,%2,%3};"                                                                                      \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define MBC_MMA(type) static_cast<void>(d), static_cast<void>(a), static_cast<void>(b0), static_cast<void>(b1)
#endif

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MBC_MMA("bf16");
}
template <>
__device__ inline void multiply_add<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MBC_MMA("f16");
}

#undef MBC_MMA

}  // namespace mbc

#endif
