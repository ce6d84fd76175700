// Hopper's tensor cores: wgmma, which a warpgroup of 128 threads starts together and which reads operands from shared
// memory; mbarriers, which count arrivals and bytes; setmaxnreg. Each function names the PTX that it wraps. Compute
// capability 9.0 only (sm_90a); on other GPUs the kernels that use them are not offered.
#pragma once

#include "mma.cuh"

namespace mbc {

constexpr int WARPGROUP = 128;
constexpr int SWIZZLE_ROW = 128;                   // bytes: 64 elements of a row in shared memory (128-byte swizzle)
constexpr int SWIZZLE_ATOM = 8 * SWIZZLE_ROW;      // eight rows, among which 16-byte chunks are swizzled
constexpr int SWIZZLE_BLOCK = 64 * SWIZZLE_ROW;    // 64 rows: distance of blocks of 64 columns if rows are K

// Offset of the `sixteen`-th 16 bytes of a row of 128 under the 128-byte swizzle, from a multiple of 1,024 bytes: equal
// 16-byte columns of eight rows are in different banks.
__device__ inline int32_t swizzled_offset(int32_t row, int32_t sixteen) {
  return row * SWIZZLE_ROW + ((sixteen ^ row % 8) * 16);
}

// `number` is equal in a whole warp; the shuffle says so to the compiler, which then keeps it in uniform registers.
template <typename Number>
__device__ inline Number warp_uniform(Number number) { return __shfl_sync(0xffffffffu, number, 0); }

// An operand without swizzle: core matrices of eight consecutive rows of 16 bytes. A core matrix may begin at any
// multiple of 16 bytes, so that an operand that is another operand shifted by some rows needs no copy.
struct CoreMatrices {
  const void* first;
  int32_t stride_bytes, leading_bytes;  // from a core matrix to those of the next eight columns and K
  int32_t begin = 0;                   // bytes from the first core matrix to the operand's beginning
};

}  // namespace mbc

#ifdef MBC_EMULATED
#include <emulated_warpgroup.h>
#else

namespace mbc {

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// An mbarrier in shared memory: a phase ends with its `count`-th arrival, once all announced bytes have arrived.
struct Barrier {
  uint64_t word;

  // mbarrier.init
  __device__ void start(int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(count) : "memory");
#endif
  }
  // mbarrier.arrive
  __device__ void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
#endif
  }
  // cp.async.mbarrier.arrive.noinc: arrives when all cp.async of this thread have arrived.
  __device__ void cp_async_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&word)) : "memory");
#endif
  }
  // mbarrier.arrive.expect_tx: arrives, and announces `bytes`, a multiple of 16.
  __device__ void arrive_expect_tx(int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
#endif
  }
  // mbarrier.arrive.expect_tx, and cp.async.bulk.
  __device__ void bulk_copy_arrive(void* to, const void* from, int bytes) {
    arrive_expect_tx(bytes);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&word))
                 : "memory");
#endif
  }
  // mbarrier.try_wait.parity: waits until the phase of this parity has ended. The phase before the first, of parity 1,
  // counts as ended.
  __device__ void wait(uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred ended;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n}" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
#endif
  }
};

// fence.mbarrier_init: makes initialized barriers visible to asynchronous copies; must precede a barrier of the block.
__device__ inline void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// fence.proxy.async: what this thread wrote to or saw in shared memory becomes visible to wgmma and TMA.
__device__ inline void fence_proxy_async() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// setmaxnreg: producer warpgroups pass registers to consumer warpgroups.
template <int COUNT>
__device__ inline void setmaxnreg_inc() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ inline void setmaxnreg_dec() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// wgmma.fence, wgmma.commit_group, wgmma.wait_group: wgmma are started between the first two; after the third, all but
// those of the last LATER groups have ended.
__device__ inline void wgmma_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Before wgmma that add to registers which other instructions have written.
template <int TILES>
__device__ inline void wgmma_fence(float (&d)[TILES][4]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v) asm volatile("" : "+f"(d[j][v])::"memory");
  wgmma_fence();
}
__device__ inline void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int LATER = 0, int TILES>
__device__ inline void wgmma_wait(float (&d)[TILES][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v) asm volatile("" : "+f"(d[j][v])::"memory");
#else
  static_cast<void>(d);
#endif
}

// stmatrix m8n8.x4: four matrices of 8 x 8 elements of 16 bits to shared memory. Thread i supplies the address of row i
// % 8 of matrix i / 8, and holds word i % 4 of row i / 4 of each matrix.
__device__ inline void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
#endif
}

// stmatrix.trans: the matrices are transposed: a thread's word is that of column i / 4, rows 2 (i % 4) and the next.
__device__ inline void stmatrix_x4_trans(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
#endif
}

// An operand with the 128-byte swizzle. Its descriptor is computed once and is equal in a whole warp, so that the
// compiler keeps it in uniform registers: another step or stage is one addition. Otherwise each wgmma waits for some
// twenty instructions.
class SwizzledDescriptor {
 public:
  __device__ explicit SwizzledDescriptor(const void* first)
      : low(warp_uniform(SWIZZLE_BLOCK / 16 << 16 | (shared_address(first) & 0x3ffff) >> 4)) {}
  __device__ SwizzledDescriptor ahead(int32_t bytes) const { return SwizzledDescriptor(low + static_cast<uint32_t>(bytes / 16)); }
  __device__ uint64_t descriptor() const { return static_cast<uint64_t>(1u << 30 | SWIZZLE_ATOM / 16) << 32 | low; }

 private:
  __device__ explicit SwizzledDescriptor(uint32_t low_) : low(low_) {}
  uint32_t low;  // low word of the descriptor
};

// An operand in core matrices, whose descriptor is computed once as well, for the reason given at SwizzledDescriptor.
class CoreMatrixDescriptor {
 public:
  __device__ explicit CoreMatrixDescriptor(const CoreMatrices& p)
      : low(warp_uniform(static_cast<uint32_t>(p.leading_bytes) >> 4 << 16 | (shared_address(p.first) & 0x3ffff) >> 4)),
        high(warp_uniform(static_cast<uint32_t>(p.stride_bytes) >> 4)) {}
  __device__ CoreMatrixDescriptor ahead(int32_t bytes) const { return {low + static_cast<uint32_t>(bytes / 16), high}; }
  __device__ uint64_t descriptor() const { return static_cast<uint64_t>(high) << 32 | low; }

 private:
  __device__ CoreMatrixDescriptor(uint32_t low_, uint32_t high_) : low(low_), high(high_) {}
  uint32_t low, high;  // words of the descriptor
};

// The matrix descriptor of wgmma (PTX ISA, "Matrix Descriptor Format"). `swizzle`: 0 none, 1 128 bytes.
__device__ inline uint64_t smem_descriptor(
    uint32_t swizzle, const void* first, int32_t stride_bytes, int32_t leading_bytes) {
  return static_cast<uint64_t>(swizzle << 30 | static_cast<uint32_t>(stride_bytes) >> 4) << 32 |
         static_cast<uint32_t>(leading_bytes) >> 4 << 16 | (shared_address(first) & 0x3ffff) >> 4;
}
__device__ inline uint64_t smem_descriptor(const void* rows) {
  return smem_descriptor(1, rows, SWIZZLE_ATOM, SWIZZLE_BLOCK);
}
__device__ inline uint64_t smem_descriptor(const SwizzledDescriptor& rows) { return rows.descriptor(); }
__device__ inline uint64_t smem_descriptor(const CoreMatrixDescriptor& rows) { return rows.descriptor(); }
// Among operands that begin at several positions of the same core matrices, the difference is a constant.
__device__ inline uint64_t smem_descriptor(const CoreMatrices& p) {
  const uint64_t first = smem_descriptor(0, p.first, p.stride_bytes, p.leading_bytes);
  return first >> 32 << 32 | (static_cast<uint32_t>(first) + (p.begin >> 4));
}

#define MBC_TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define MBC_TWO_TILES(j) MBC_TILE(j), MBC_TILE(j + 1)
#define MBC_FOUR_TILES(j) MBC_TWO_TILES(j), MBC_TWO_TILES(j + 2)
#define MBC_EIGHT_TILES(j) MBC_FOUR_TILES(j), MBC_FOUR_TILES(j + 4)
// Their positions among the operands of an instruction.
#define MBC_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MBC_D32 MBC_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MBC_D48 MBC_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MBC_D64 MBC_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MBC_D72 MBC_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MBC_D96                                                                                      \
  MBC_D72                                                                                            \
  ", %72, %73, %74, %75, %76, %77, %78, %79, "                                                       \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MBC_D128                                                                                     \
  MBC_D96                                                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MBC_WGMMA(n, type, d, operands, adds)                                                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " adds ", 0;\n"                                                  \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" d "}, " operands ";\n}"

// wgmma.mma_async m64nNk16 of T, bf16 or fp16, into fp32, N = 8 TILES: D = A B, or D += A B if it `adds`. A is in
// registers, 16 rows for each warp as in `mma_m16n8k16`; B of K = 16 is in shared memory, as core matrices or with the
// 128-byte swizzle (`swizzled_offset`). MN_MAJOR: rows are K, with swizzle 128 bytes long and blocks of 64 columns one
// behind another; otherwise rows are columns of B, with K = 64 in each. PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
template <bool MN_MAJOR, typename T, int TILES, typename Operand>
__device__ inline void wgmma_rs(float (&d)[TILES][4], const uint32_t (&a)[4], const Operand& b, bool adds) {
  static_assert(TILES == 4 || TILES == 8 || TILES == 12 || TILES == 16 || TILES == 24);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MBC_WGMMA_RS(n, type, d, a0, a1, a2, a3, b, adds_at, major, ...)                                       \
  asm volatile(MBC_WGMMA(n, type, d, "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b ", p, 1, 1, %" major, "%" adds_at) \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand), "r"(static_cast<int>(adds)),        \
                 "n"(MN_MAJOR ? 1 : 0))
#define MBC_WGMMA_RS_OF(type)                                                                                  \
  if constexpr (TILES == 4)                                                                                    \
    MBC_WGMMA_RS("32", type, MBC_D16, "16", "17", "18", "19", "20", "21", "22", MBC_FOUR_TILES(0));            \
  else if constexpr (TILES == 12)                                                                              \
    MBC_WGMMA_RS("96", type, MBC_D48, "48", "49", "50", "51", "52", "53", "54", MBC_EIGHT_TILES(0),            \
                 MBC_FOUR_TILES(8));                                                                           \
  else if constexpr (TILES == 8)                                                                                    \
    MBC_WGMMA_RS("64", type, MBC_D32, "32", "33", "34", "35", "36", "37", "38", MBC_EIGHT_TILES(0));           \
  else if constexpr (TILES == 16)                                                                              \
    MBC_WGMMA_RS("128", type, MBC_D64, "64", "65", "66", "67", "68", "69", "70", MBC_EIGHT_TILES(0),           \
                 MBC_EIGHT_TILES(8));                                                                          \
  else                                                                                                         \
    MBC_WGMMA_RS("192", type, MBC_D96, "96", "97", "98", "99", "100", "101", "102", MBC_EIGHT_TILES(0),        \
                 MBC_EIGHT_TILES(8), MBC_EIGHT_TILES(16))
  const uint64_t operand = smem_descriptor(b);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MBC_WGMMA_RS_OF("bf16");
  } else {
    MBC_WGMMA_RS_OF("f16");
  }
#undef MBC_WGMMA_RS_OF
#undef MBC_WGMMA_RS
#else
  static_cast<void>(d), static_cast<void>(a), static_cast<void>(b), static_cast<void>(adds);
#endif
}

// wgmma with A in shared memory, too: K = 16 of 64 rows; N is 96, 128, 144, 192 or 256.
template <bool MN_MAJOR, typename T, int TILES, typename Operand>
__device__ inline void wgmma_ss(float (&d)[TILES][4], const Operand& a, const Operand& b, bool adds) {
  static_assert(TILES == 12 || TILES == 16 || TILES == 18 || TILES == 24 || TILES == 32);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MBC_WGMMA_SS(n, type, d, a_at, b_at, adds_at, major, ...)                                    \
  asm volatile(MBC_WGMMA(n, type, d, "%" a_at ", %" b_at ", p, 1, 1, 0, %" major, "%" adds_at)       \
               : __VA_ARGS__                                                                         \
               : "l"(smem_descriptor(a)), "l"(smem_descriptor(b)), "r"(static_cast<int>(adds)),      \
                 "n"(MN_MAJOR ? 1 : 0))
#define MBC_WGMMA_SS_OF(type)                                                                        \
  if constexpr (TILES == 12)                                                                         \
    MBC_WGMMA_SS("96", type, MBC_D48, "48", "49", "50", "51", MBC_EIGHT_TILES(0), MBC_FOUR_TILES(8)); \
  else if constexpr (TILES == 16)                                                                    \
    MBC_WGMMA_SS("128", type, MBC_D64, "64", "65", "66", "67", MBC_EIGHT_TILES(0), MBC_EIGHT_TILES(8)); \
  else if constexpr (TILES == 18)                                                                    \
    MBC_WGMMA_SS("144", type, MBC_D72, "72", "73", "74", "75", MBC_EIGHT_TILES(0), MBC_EIGHT_TILES(8), \
                 MBC_TWO_TILES(16));                                                                 \
  else if constexpr (TILES == 24)                                                                    \
    MBC_WGMMA_SS("192", type, MBC_D96, "96", "97", "98", "99", MBC_EIGHT_TILES(0), MBC_EIGHT_TILES(8), \
                 MBC_EIGHT_TILES(16));                                                               \
  else                                                                                               \
    MBC_WGMMA_SS("256", type, MBC_D128, "128", "129", "130", "131", MBC_EIGHT_TILES(0), MBC_EIGHT_TILES(8), \
                 MBC_EIGHT_TILES(16), MBC_EIGHT_TILES(24))
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MBC_WGMMA_SS_OF("bf16");
  } else {
    MBC_WGMMA_SS_OF("f16");
  }
#undef MBC_WGMMA_SS_OF
#undef MBC_WGMMA_SS
#else
  static_cast<void>(d), static_cast<void>(a), static_cast<void>(b), static_cast<void>(adds);
#endif
}
#undef MBC_WGMMA
#undef MBC_D128
#undef MBC_D96
#undef MBC_D72
#undef MBC_D64
#undef MBC_D48
#undef MBC_D32
#undef MBC_D16
#undef MBC_EIGHT_TILES
#undef MBC_FOUR_TILES
#undef MBC_TWO_TILES
#undef MBC_TILE

}  // namespace mbc

#endif
