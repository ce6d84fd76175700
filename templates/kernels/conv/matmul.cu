// Products of matrices that two tensors hold in their last two axes, either of which may be transposed; also the passes
// of linear layers that cuBLASLt refuses: y = x w^T, dx = dy w, dw = dy^T x.
//
// GEMM       `groups` of M = rows, N = columns, K = depth.
// Tile       64 x 64, K = 16, by 256 threads of 4 x 4 FMA accumulators each (tiled_gemm.cuh); 8,704 bytes of shared
//            memory.
// Limit      FMA: it exists so that every request has a kernel, not to be fast.
#include "tiled_gemm.cuh"
#include "matmul_arguments.h"

namespace mbc {

constexpr int64_t MOST_GROUPS = 65535;  // most groups of a launch: blocks along z

// Element (index, k) of the matrix of a group, or of its transpose.
template <typename T>
struct GroupMatrix {
  const T* data;
  int64_t group_stride, row_stride, k_stride;

  using Row = const T*;
  __device__ Row row(int64_t group, int64_t index) const { return data + group * group_stride + index * row_stride; }
  __device__ float at(Row row, int64_t k) const { return to_float(row[k * k_stride]); }
};

// ADDS: it may add to the present values.
template <typename T, bool ADDS>
struct GroupMatrixOut {
  T* data;
  int64_t rows, columns;
  bool accumulate;

  __device__ void put(int64_t group, int64_t, int64_t m, int64_t n, float value) const {
    T* at = data + (group * rows + m) * columns + n;
    *at = from_float<T>(ADDS && accumulate ? to_float(*at) + value : value);
  }
};

template <bool ADDS, typename T, typename R>
void run_matmul(const MbcCall& call, const T* a_data, const T* b_data, R* results) {
  const auto& a = arguments<MatmulArguments>(call);
  GroupMatrix<T> left{a_data, a.rows * a.depth, a.transpose_a != 0 ? 1 : a.depth, a.transpose_a != 0 ? a.rows : 1};
  GroupMatrix<T> right{b_data, a.columns * a.depth, a.transpose_b != 0 ? a.depth : 1, a.transpose_b != 0 ? 1 : a.columns};
  GroupMatrixOut<R, ADDS> result{results, a.rows, a.columns, a.accumulate != 0};
  for (int64_t left_over = a.groups; left_over > 0; left_over -= MOST_GROUPS) {
    const int64_t groups = left_over < MOST_GROUPS ? left_over : MOST_GROUPS;
    run_tiled_gemm(call.stream, left, right, result, a.rows, a.columns, a.depth, groups, 1);
    left.data += groups * left.group_stride;
    right.data += groups * right.group_stride;
    result.data += groups * a.rows * a.columns;
  }
}

}  // namespace mbc

// A linear layer and the gradient of its input use this launcher, too.
extern "C" const char* mbc_matmul(const MbcCall& call) {
  using namespace mbc;
  MBC_FOR_TYPE(arguments<MatmulArguments>(call).type, T, {
    run_matmul<false>(call, in<T>(call, 0), in<T>(call, 1), out<T>(call, 2));
  });
  return launched();
}

extern "C" const char* mbc_linear_backward_filter(const MbcCall& call) {
  using namespace mbc;
  MBC_FOR_TYPE(arguments<MatmulArguments>(call).type, T, {
    run_matmul<true>(call, in<T>(call, 1), in<T>(call, 0), out<float>(call, 2));
  });
  return launched();
}
