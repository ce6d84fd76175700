// Boxes of tensors, which the tensor memory accelerator (TMA) copies between global and shared memory: one thread
// starts a copy; elements outside the tensor become zero, or are not stored. From compute capability 9.0 on.
#pragma once

#include "wgmma.cuh"

#ifdef MBC_EMULATED
#include <emulated_tensor_map.h>
#else
#include <cuda.h>

namespace mbc {

// A tensor in global memory, and the box of it that one copy moves; a parameter of a kernel, __grid_constant__.
using TensorMap = CUtensorMap;

// cuTensorMapEncodeTiled, from the driver that the CUDA runtime has loaded.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* encode_function = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode_function, 12000, cudaEnableDefault, &status);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode_function, cudaEnableDefault, &status);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode_function);
  }();
  return encode;
}

// Describes a dense tensor of these sizes, innermost dimension first, of elements of 1, 2 or 4 bytes, at a multiple of
// 16 bytes, with rows of a multiple of 16 bytes. `swizzled`: the box has rows of 128 bytes, with the swizzle that wgmma
// reads (`swizzled_offset`). Returns an error, or null.
template <int RANK>
const char* make_tensor_map(TensorMap& map, const void* first, int bytes, const int64_t (&sizes)[RANK],
                            const int (&box)[RANK], bool swizzled) {
  const auto encode = tensor_map_encoder();
  const auto type = bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  cuuint64_t dimensions[RANK], strides[RANK], stride = static_cast<cuuint64_t>(bytes);
  cuuint32_t box_dimensions[RANK], steps[RANK];
  for (int i = 0; i < RANK; ++i) {
    dimensions[i] = static_cast<cuuint64_t>(sizes[i]);
    box_dimensions[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    strides[i] = stride *= dimensions[i];
  }
  const bool encoded = encode && encode(&map, type, RANK, const_cast<void*>(first), dimensions, strides, box_dimensions, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return encoded ? nullptr : "the driver cannot create a tensor map (cuTensorMapEncodeTiled) of an operand";
}

// cp.async.bulk.tensor: copies the box from an element on, innermost index first, which must be at a multiple of 16
// bytes of its row (other positions are an illegal instruction). `full` counts the bytes of the whole box.
__device__ inline void tma_load(void* to, const TensorMap& map, const int32_t (&at)[2], Barrier& full) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(shared_address(&full.word))
      : "memory");
#endif
}
__device__ inline void tma_load(void* to, const TensorMap& map, const int32_t (&at)[3], Barrier& full) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(shared_address(&full.word))
      : "memory");
#endif
}

// Copies a box from shared to global memory, in a group of its own (cp.async.bulk.commit_group). Threads must have made
// their writes visible by `fence_proxy_async` before a barrier.
__device__ inline void tma_store(const TensorMap& map, const int32_t (&at)[3], const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(at[0]),
               "r"(at[1]), "r"(at[2]), "r"(shared_address(from))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// cp.async.bulk.wait_group.read: waits until shared memory of all boxes that this thread stores has been read.
__device__ inline void tma_store_wait_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace mbc

#endif
