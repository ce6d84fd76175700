// A tiled GEMM of fp32 FMA over operands that are read by (row, k): the matrices of a linear layer, or the windows of a
// convolution (implicit GEMM). It runs requests that the vendor's libraries refuse, and does not compete with them.
//
// Tile       64 x 64, K = 16, by 256 threads: thread (x, y) = (thread % 16, thread / 16) has the 4 x 4 accumulators of
//            rows 4y .. 4y + 3 and columns 4x .. 4x + 3.
// Shared     two operands of [16][68] floats: 8,704 bytes. The pitch of 68 keeps 16-byte alignment of rows.
#pragma once

#include "device.cuh"

namespace mbc {

constexpr int TILE = 64, DEPTH = 16;

// out(m, n) = sum over k in [0, depth) of a(m, k) * b(n, k), for `groups` independent GEMMs. A and B have `using Row`,
// `Row row(int64_t group, int64_t index)` (the part that does not depend on k) and `float at(const Row&, int64_t k)`.
// Out has `void put(int64_t group, int64_t part, int64_t m, int64_t n, float)`. Parts divide K (split-K).
template <typename A, typename B, typename Out>
__global__ void tiled_gemm(A a, B b, Out out, int64_t rows, int64_t columns, int64_t depth, int64_t parts) {
  __shared__ float sa[DEPTH][TILE + 4], sb[DEPTH][TILE + 4];
  const int64_t group = blockIdx.z / parts, part = blockIdx.z % parts;
  const int64_t begin = depth / parts * part + min(part, depth % parts);
  const int64_t end = begin + depth / parts + (part < depth % parts ? 1 : 0);
  const int64_t m0 = static_cast<int64_t>(blockIdx.x) * TILE, n0 = static_cast<int64_t>(blockIdx.y) * TILE;
  const int lane = threadIdx.x % TILE, level = threadIdx.x / TILE;
  const int across = threadIdx.x % 16 * 4, down = threadIdx.x / 16 * 4;
  const bool row_inside = m0 + lane < rows, column_inside = n0 + lane < columns;
  const auto row = a.row(group, row_inside ? m0 + lane : 0);
  const auto column = b.row(group, column_inside ? n0 + lane : 0);
  float sum[4][4] = {};
  for (int64_t k0 = begin; k0 < end; k0 += DEPTH) {
#pragma unroll
    for (int k = level; k < DEPTH; k += THREADS / TILE) {
      const bool inside = k0 + k < end;
      sa[k][lane] = inside && row_inside ? a.at(row, k0 + k) : 0.0f;
      sb[k][lane] = inside && column_inside ? b.at(column, k0 + k) : 0.0f;
    }
    __syncthreads();
    // A sum of short sums, because the rounding error of one long chain grows with its length.
    float short_sum[4][4] = {};
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) short_sum[i][j] = fmaf(sa[k][down + i], sb[k][across + j], short_sum[i][j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += short_sum[i][j];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (m0 + down + i < rows && n0 + across + j < columns)
        out.put(group, part, m0 + down + i, n0 + across + j, sum[i][j]);
}

template <typename A, typename B, typename Out>
void run_tiled_gemm(cudaStream_t stream, A a, B b, Out out, int64_t rows, int64_t columns, int64_t depth, int64_t groups,
                 int64_t parts) {
  const dim3 grid(static_cast<unsigned>(divide_up(rows, TILE)), static_cast<unsigned>(divide_up(columns, TILE)),
                  static_cast<unsigned>(groups * parts));
  MBC_LAUNCH((tiled_gemm<A, B, Out>), grid, THREADS, stream, a, b, out, rows, columns, depth, parts);
}

}  // namespace mbc
