// Fully connected layers that cuBLASLt refuses: y = x w^T, dx = dy w, dw = dy^T x.
//
// GEMM       forward M = samples, N = outputs, K = inputs; data N = inputs, K = outputs; filter M = outputs, N =
//            inputs, K = samples.
// Tile       64 x 64, K = 16, by 256 threads of 4 x 4 FMA accumulators each (tiled_gemm.cuh); 8,704 bytes of shared
//            memory.
// Limit      FMA: it exists so that every request has a kernel, not to be fast.
#include "tiled_gemm.cuh"
#include "direct_arguments.h"

namespace mbc {

// Element (index, k) of a matrix, or of its transpose.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row_stride, k_stride;

  using Row = const T*;
  __device__ Row row(int64_t, int64_t index) const { return data + index * row_stride; }
  __device__ float at(Row row, int64_t k) const { return to_float(row[k * k_stride]); }
};

template <typename T>
struct MatrixOut {
  T* data;
  int64_t columns;
  bool accumulate;

  __device__ void put(int64_t, int64_t, int64_t m, int64_t n, float value) const {
    T* at = data + m * columns + n;
    *at = from_float<T>(accumulate ? to_float(*at) + value : value);
  }
};

}  // namespace mbc

extern "C" const char* mbc_linear(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<LinearArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    run_tiled_gemm(call.stream, Matrix<T>{in<T>(call, 0), a.inputs, 1}, Matrix<T>{in<T>(call, 1), a.inputs, 1},
                MatrixOut<T>{out<T>(call, 2), a.outputs, false}, a.rows, a.outputs, a.inputs, 1, 1);
  });
  return launched();
}

extern "C" const char* mbc_linear_backward_data(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<LinearArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    run_tiled_gemm(call.stream, Matrix<T>{in<T>(call, 0), a.outputs, 1}, Matrix<T>{in<T>(call, 1), 1, a.inputs},
                MatrixOut<T>{out<T>(call, 2), a.inputs, false}, a.rows, a.inputs, a.outputs, 1, 1);
  });
  return launched();
}

extern "C" const char* mbc_linear_backward_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<LinearFilterArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    run_tiled_gemm(call.stream, Matrix<T>{in<T>(call, 1), 1, a.outputs}, Matrix<T>{in<T>(call, 0), 1, a.inputs},
                MatrixOut<float>{out<float>(call, 2), a.inputs, a.accumulate != 0}, a.outputs, a.inputs, a.rows, 1, 1);
  });
  return launched();
}
