// Boxes of matrices, which the tensor memory accelerator (TMA) copies into shared memory: one thread starts a copy, and
// what lies outside of the matrix becomes zero. From compute capability 9.0 on.
#pragma once

#include "wgmma.cuh"

#ifdef MBC_EMULATED
#include <emulated_tensor_map.h>
#else
#include <cuda.h>

namespace mbc {

// A matrix in global memory, and the box of it that is copied at once; a parameter of a kernel, __grid_constant__.
using TensorMap = CUtensorMap;

// cuTensorMapEncodeTiled, which is found in the driver that the CUDA runtime has loaded.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

// Of [rows, columns] of elements of 1 or 2 bytes at a multiple of 16 bytes, with rows of a multiple of 16 bytes. `swizzled`: the box has rows of 128
// bytes, with the swizzle that wgmma reads (`swizzled_offset`). Returns what went wrong, or null.
inline const char* make_tensor_map(TensorMap& map, const void* first, int bytes, int64_t rows, int64_t columns,
                                   int box_rows, int box_columns, bool swizzled) {
  const auto encode = tensor_map_encoder();
  const auto type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const cuuint64_t sizes[]{static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[]{sizes[0] * static_cast<cuuint64_t>(bytes)};
  const cuuint32_t box[]{static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, steps[]{1, 1};
  const bool made = encode && encode(&map, type, 2, const_cast<void*>(first), sizes, row_bytes, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return made ? nullptr : "the driver makes no tensor map (cuTensorMapEncodeTiled) of an operand";
}

// cp.async.bulk.tensor.2d: the box from (row, column) on, whose bytes, all of the box, `full` counts.
__device__ inline void copy_box(void* to, const TensorMap& map, int32_t row, int32_t column, Barrier& full) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&full.word))
      : "memory");
#endif
}

}  // namespace mbc

#endif
