// A reduction over a tensor and a map by its result, in one launch, for tensors so small that a launch takes longer
// than reading their bytes. Channels last.
//
// A cluster of blocks (from compute capability 9.0) shares a tile of channels; each block has its own rows:
//
//            channels of a tile           1. each block reduces its rows; threads keep the first few in registers
//   block 0  rows 0 .. r - 1      ]       2. cluster_sync: partial sums are in (distributed) shared memory
//   block 1  rows r .. 2 r - 1    ] one   3. each block adds the partial sums of all, in order
//   ...                           ]       4. each block maps its rows by the result
#pragma once

#include "channel_reduce.cuh"

namespace mbc {

constexpr unsigned WARP = 32, WARPS = THREADS / WARP, MOST_PARTS = 8, MOST_TILE = THREADS;

// A block's part of a tile: `tile_vectors` vectors (a power of two) of its rows.
template <int N>
struct Part {
  unsigned thread, tile;  // thread of the block; channels of the tile
  int64_t first, c;       // first channels of the tile and of this thread
  int64_t begin, stride;  // first element of this thread, and distance to its next row
  int count;              // rows of this thread
  float rows;             // of the block

  __device__ Part(int64_t all_rows, int64_t channels) {
    thread = threadIdx.y * blockDim.x + threadIdx.x;
    tile = blockDim.x * N;
    first = static_cast<int64_t>(blockIdx.x) * tile;
    c = first + threadIdx.x * N;
    const PartRange share(all_rows);
    const int64_t start = share.begin + threadIdx.y;
    begin = start * channels + c;
    stride = blockDim.y * channels;
    count = c < channels ? static_cast<int>(share.count(start, blockDim.y)) : 0;
    rows = static_cast<float>(share.end - share.begin);
  }
  __device__ bool owns_channel(int64_t channels) const { return thread < tile && first + thread < channels; }
};

// Sums over the rows of a block, in a fixed order. At the end thread t < tile has the sum of the tile's channel t.
template <int N, int SUMS>
struct BlockSum {
  float warps[WARPS][SUMS][MOST_TILE];

  __device__ void store_warp_sums(float (&x)[SUMS][N]) {
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
    Left left{0, N};
    fold<N>(x, thread % WARP, left);
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
#pragma unroll
      for (unsigned j = 0; j < N; ++j)
        if (j < left.count) warps[thread / WARP][s][threadIdx.x * N + left.first + j] = x[s][j];
  }
  // Must be called after a barrier of the block.
  __device__ float block_sum(int sum, unsigned channel) const {
    float all = 0.0f;
#pragma unroll
    for (unsigned w = 0; w < WARPS; ++w) all += warps[w][sum][channel];
    return all;
  }

 private:
  struct Left {
    unsigned first, count;  // the channels of the vector that a lane adds up
  };
  // Butterfly reduction by shuffles over the lanes of a warp that have the same channels; in each step two lanes divide
  // those of the MANY channels that they both still have.
  template <int MANY, unsigned STEP = WARP / 2>
  __device__ void fold(float (&x)[SUMS][N], unsigned lane, Left& left) const {
    if constexpr (STEP > 0) {
      if (STEP < blockDim.x) return;
      constexpr int HALF = MANY > 1 ? MANY / 2 : 1, FAR = MANY > 1 ? HALF : 0;
      const bool upper = (lane & STEP) != 0;
      left.count = HALF;
      left.first += upper ? FAR : 0;
#pragma unroll
      for (int s = 0; s < SUMS; ++s)
#pragma unroll
        for (int j = 0; j < HALF; ++j) {
          const float mine = upper ? x[s][j + FAR] : x[s][j], other = upper ? x[s][j] : x[s][j + FAR];
          x[s][j] = mine + __shfl_xor_sync(~0u, other, static_cast<int>(STEP));
        }
      fold<HALF, STEP / 2>(x, lane, left);
    }
  }
};

// Partial sums of a block for a channel.
struct BlockPartial {
  float a, b;
};

// The partial sums of all blocks of the cluster for a channel, after `cluster_sync`.
struct ClusterPartials {
  BlockPartial parts[MOST_PARTS];

  template <typename Shared>
  __device__ ClusterPartials(const Shared& shared, unsigned channel) {
#pragma unroll
    for (unsigned part = 0; part < MOST_PARTS; ++part)
      if (part < gridDim.y) parts[part] = map_shared_rank(shared, part).partials[channel];
  }
  template <typename Each>
  __device__ void each(Each each) const {
#pragma unroll
    for (unsigned part = 0; part < MOST_PARTS; ++part)
      if (part < gridDim.y) each(part, parts[part]);
  }
};

// The calls mark that: all blocks have written partial sums; this block has read them; all blocks have read them, so
// that this block may exit.
__device__ inline void cluster_sync() {
  if (gridDim.y > 1) cluster_arrive(), cluster_wait();
}
__device__ inline void cluster_done_reading() {
  if (gridDim.y > 1) cluster_arrive();
}
__device__ inline void cluster_await_readers() {
  if (gridDim.y > 1) cluster_wait();
}

// The rows of a thread, K at a time; the first K stay in registers.
template <typename S, int N>
struct Rows {
  static constexpr int K = S::OPERANDS > 2 ? 2 : 4;
  using Fetched = typename S::template Fetched<N>;
  const S& source;
  const Part<N>& part;
  Fetched held[K];

  __device__ Rows(const S& source_, const Part<N>& part_) : source(source_), part(part_) { fetch(0); }
  __device__ void fetch(int row) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (row + k < part.count) held[k] = source.template fetch<N>(part.begin + (row + k) * part.stride);
  }
  // Calls f for the rows that were fetched from `row` on.
  template <typename Each>
  __device__ void for_held(int row, Each each) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (row + k < part.count) each(held[k], part.begin + (row + k) * part.stride);
  }
  // Calls f for all rows; the first K are in registers.
  template <typename Each>
  __device__ void all(Each each) {
    for_held(0, each);
    for (int row = K; row < part.count; row += K) {
      fetch(row);
      for_held(row, each);
    }
  }
  __device__ void reload() {
    if (part.count > K) fetch(0);
  }
};

// `tile_vectors`: vectors of a row in a tile, a power of two; `parts`: blocks of a cluster. Both are part of the plan.
template <typename... Parameters, typename... Given>
void launch_single(cudaStream_t stream, void (*kernel)(Parameters...), int width, int64_t channels, int64_t tile_vectors,
                    int64_t parts, const Given&... given) {
  const dim3 grid(static_cast<unsigned>(divide_up(divide_up(channels, width), tile_vectors)), static_cast<unsigned>(parts));
  const dim3 block(static_cast<unsigned>(tile_vectors), static_cast<unsigned>(THREADS / tile_vectors));
  MBC_LAUNCH_CLUSTER(kernel, grid, block, stream, given...);
}

}  // namespace mbc
