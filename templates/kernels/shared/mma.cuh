// Tensor cores through mma.sync, and cp.async and ldmatrix for their operands, from compute capability 8.0 on. Each
// function names the PTX that it wraps.
#pragma once

#include "device.cuh"

#ifdef MBC_EMULATED
#include <emulated_mma.h>
#else

namespace mbc {

// mma.sync m16n8k16: D += A B for the 32 threads of a warp together: A 16 x 16 by rows, B 16 x 8 by columns, D 16 x 8,
// of T and fp32.
//
// Thread (g, t) = (lane / 4, lane % 4) holds two neighbouring elements in each word: of A (row, first column) (g, 2t),
// (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of B (first row, column) (2t, g), (2t + 8, g). Of D: (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1). PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

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
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MBC_MMA("bf16");
}
template <>
__device__ inline void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MBC_MMA("f16");
}

#undef MBC_MMA

// mma.sync m16n8k8 of tf32, whose last 13 bits of a word are ignored: A 16 x 8, (row, column) (g, t), (g + 8, t), (g, t
// + 4), (g + 8, t + 4); B 8 x 8, (t, g), (t + 4, g). "Matrix Fragments for mma.m16n8k8".
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#else
  static_cast<void>(d), static_cast<void>(a), static_cast<void>(b0), static_cast<void>(b1);
#endif
}

// A word truncated to tf32; NaN that the GPU itself generates keep their bits.
__device__ inline float truncate_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// cvt.rna.tf32: the nearest number in tf32.
__device__ inline float to_tf32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return __uint_as_float(word);
#else
  return x;
#endif
}

// cp.async of 16 bytes to shared memory, or of zeros if they are not `there`.
__device__ inline void cp_async_16(uint4* to, const void* from, bool there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
  static_cast<void>(to), static_cast<void>(from), static_cast<void>(there);
#endif
}
// cp.async.commit_group
__device__ inline void cp_async_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// cp.async.wait_group: until all but the last N groups of this thread have arrived.
template <int N>
__device__ inline void cp_async_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MBC_LDMATRIX(order)                                                                  \
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));                  \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" order ".shared.b16 {%0,%1,%2,%3}, [%4];"      \
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])              \
               : "r"(at)                                                                     \
               : "memory")
#else
#define MBC_LDMATRIX(order) static_cast<void>(words), static_cast<void>(row)
#endif

// ldmatrix.x4: four matrices of 8 x 8 elements, each row 16 bytes in shared memory, whose address a thread supplies:
// threads 8 i to 8 i + 7 those of the rows of matrix i. Thread (g, t) gets elements (g, 2t) and (g, 2t + 1) of each
// matrix as a word.
__device__ inline void ldmatrix_x4(uint32_t (&words)[4], const uint4* row) { MBC_LDMATRIX(""); }
// ldmatrix.x4.trans: thread (g, t) gets elements (2t, g) and (2t + 1, g) of each matrix.
__device__ inline void ldmatrix_x4_trans(uint32_t (&words)[4], const uint4* row) { MBC_LDMATRIX(".trans"); }

#undef MBC_LDMATRIX

}  // namespace mbc

#endif

namespace mbc {

// Rounds 16 bytes in shared memory, which this thread copied there.
__device__ inline void round_to_tf32(uint4* four) {
  float* words = reinterpret_cast<float*>(four);
  Vec<float, 4> rounded = load<4>(words);
#pragma unroll
  for (int e = 0; e < 4; ++e) rounded.v[e] = to_tf32(rounded.v[e]);
  store(words, rounded);
}

// Calls `run` with an element of the library's working type, if that is the operands' type and tensor cores support it.
template <typename Run>
const char* with_working_type(int64_t type, const Run& run) {
#if MBC_WORKING != 0
  if (type == MBC_WORKING) return run(MbcWorking());
#endif
  return "this kernel does not take fp32";
}

// A launcher whose operands must be aligned: returns the error of `run`, or the status of the launch.
template <typename Arguments, typename Run>
const char* on_tensor_cores(const MbcCall& call, const Run& run) {
  if (const char* problem = unaligned(call)) return problem;
  return with_working_type(arguments<Arguments>(call).type, [&](auto of) {
    if constexpr (std::is_void_v<decltype(run(of))>)
      run(of);
    else if (const char* problem = run(of))
      return problem;
    return launched();
  });
}

}  // namespace mbc
