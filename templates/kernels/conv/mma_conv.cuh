// Convolutions by mma.sync with maps and reductions in the epilogue: the kernel around the main loop of mma_gemm.cuh. Its
// sources and reductions are those of the wgmma kernels (smem_operands.cuh), and so are the states that it writes.
//
// Block      all tiles of the same filters whose numbers are `blocks` apart. The number of blocks is independent of the
//            GPU, so that sums have one order.
// Epilogue   results are rounded to shared memory, then a thread reads eight filters of one pixel after another, with the
//            other operands from global memory. States of a tile's threads are merged with those of earlier tiles, one
//            state for each filter, so that the main loop holds no others.
// Registers  at most 128, so that two blocks are resident: one multiplies while the other stores.
// Limit      bytes for most 1x1 convolutions, tensor cores for windows.
#pragma once

#include "mma_gemm.cuh"
#include "smem_operands.cuh"

namespace mbc {

// One GEMM, or two whose results are operands of one source.
template <typename First, typename Second = void>
struct MmaGemms {
  First first;
  Second second;
};
template <typename First>
struct MmaGemms<First, void> {
  First first;
};

struct MmaConv {
  int32_t pixels, filters, across, tiles;  // blocks of filters across; tiles of pixels

  MmaConv(int64_t pixels_, int64_t filters_, int tile_filters)
      : pixels(narrow(pixels_)), filters(narrow(filters_)), across(narrow(divide_up(filters_, tile_filters))),
        tiles(narrow(divide_up(pixels_, MMA_PIXELS))) {}
};

// Where the epilogue's threads are: eight filters of every ROWS-th pixel.
template <typename Tile, GemmResult M, typename T, typename S, typename R>
__device__ inline void write_tile(char* results, char* free, int32_t first_pixel, int32_t first_filter, const MmaConv& f,
                                  T* __restrict__ output, const S& source, const R& r, typename R::State& kept) {
  constexpr int EIGHTS = Tile::FILTERS / 8, ROWS = MMA_THREADS / EIGHTS;
  static_assert(ROWS % 8 == 0);  // the swizzle is equal for all results of a thread
  const int32_t thread = threadIdx.x, eight = thread % EIGHTS, mine = thread / EIGHTS, filter = first_filter + eight * 8;
  auto* constants = reinterpret_cast<typename R::Channel*>(free);
  auto* states = reinterpret_cast<typename R::State*>(results);
  if constexpr (!std::is_same_v<R, NoReduction>) {
    if (thread < Tile::FILTERS && first_filter + thread < f.filters) constants[thread] = r.load(first_filter + thread);
    __syncthreads();
  }
  ThreadReduction<R> sums([&](int j) { return constants[eight * 8 + j]; });
  const int32_t first = first_pixel + mine, exchanged = Tile::result_offset(mine, eight);
  const auto fetch = [&](int i) {
    const int64_t at = static_cast<int64_t>(first + i) * f.filters + filter;
    S with_results = source;
    // A result has the index `at`, too: the pointer is that of the tensor that would begin so far before the tile.
    const auto of = [&](int gemm) {
      const char* row = results - (GEMMS<M> - 1 - gemm) * Tile::RESULT_BYTES + exchanged + i * Tile::RESULT_ROW;
      return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(row) - static_cast<uintptr_t>(at) * sizeof(T));
    };
    if constexpr (COMPUTES_X<M>) x_operand(with_results) = of(0);
    if constexpr (COMPUTES_GRADIENT<M>) gradient_operand(with_results) = of(GEMMS<M> - 1);
    return with_results.template fetch<8>(at);
  };
  const auto begin = [&](const auto& fetched) { sums.begin(r, source, fetched); };
  const auto write = [&](int i, auto& fetched) {
    const int64_t at = static_cast<int64_t>(first + i) * f.filters + filter;
    store_gemm_result<M>(source, output + at, fetched);
    sums.add(r, source, fetched, at);
  };
  if (filter < f.filters) each_pixel<MMA_PIXELS, ROWS, PIXELS_AT_ONCE<S>>(f.pixels - first, mine, fetch, begin, write);
  if constexpr (REDUCES<R>) {
    static_assert(ROWS * Tile::FILTERS * static_cast<int>(sizeof(typename R::State)) <= Tile::STAGES_BYTES);
    __syncthreads();  // all results have been read
    sums.store_state(r, states + mine * Tile::FILTERS + eight * 8);
    __syncthreads();
    if (thread < Tile::FILTERS)
      kept = r.combine(ROWS + 1, [&](unsigned i) { return i < ROWS ? states[i * Tile::FILTERS + thread] : kept; });
  }
}

// `output`: where the result is stored, or null. `partial`: the states of each block's filters.
template <typename Tile, GemmResult M, typename T, typename G, typename S, typename R>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    mma_conv(G gemms, T* __restrict__ output, S source, R r, typename R::State* partial, MmaConv f) {
  MBC_DYNAMIC_SHARED(shared);
  char* const stages = reinterpret_cast<char*>(shared) + (GEMMS<M> - 1) * Tile::RESULT_BYTES;
  const int32_t block = static_cast<int32_t>(blockIdx.x) / f.across, step = static_cast<int32_t>(gridDim.x) / f.across;
  const int32_t first_filter = static_cast<int32_t>(blockIdx.x) % f.across * Tile::FILTERS;
  typename R::State kept{};
  for (int32_t tile = block; tile < f.tiles; tile += step) {
    // Reductions walk from the last tile to the first, as in channel_reduce.cuh.
    const int32_t first_pixel = (REDUCES<R> ? f.tiles - 1 - tile : tile) * MMA_PIXELS;
    if constexpr (GEMMS<M> == 2) {
      multiply_tile<Tile>(gemms.first, first_pixel, first_filter, stages, stages - Tile::RESULT_BYTES);
      multiply_tile<Tile>(gemms.second, first_pixel, first_filter, stages, stages);
    } else {
      multiply_tile<Tile>(gemms.first, first_pixel, first_filter, stages, stages);
    }
    write_tile<Tile, M>(stages, stages + Tile::RESULT_BYTES, first_pixel, first_filter, f, output, source, r, kept);
  }
  if constexpr (REDUCES<R>) {
    const int32_t filter = first_filter + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < Tile::FILTERS && filter < f.filters) partial[static_cast<int64_t>(block) * f.filters + filter] = kept;
  }
}

// `blocks`: of the same filters. A last tile of at most 64 filters makes tiles of 64 the better ones.
template <GemmResult M, typename T, typename G, typename S, typename R>
void run_mma_conv(cudaStream_t stream, int64_t pixels, int64_t filters, int64_t blocks, const G& gemms, T* output,
                  const S& source, const R& r, typename R::State* partial) {
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    const MmaConv f(pixels, filters, Tile::FILTERS);
    const int shared_bytes = Tile::STAGES_BYTES + (GEMMS<M> - 1) * Tile::RESULT_BYTES;
    MBC_LAUNCH_SHARED((mma_conv<Tile, M, T, G, S, R>), static_cast<unsigned>(blocks * f.across), MMA_THREADS, shared_bytes,
                      stream, gemms, output, source, r, partial, f);
  };
  if ((filters - 1) % 128 < 64)
    run(MmaTile<64>());
  else
    run(MmaTile<128>());
  if constexpr (REDUCES<R>) merge_all_parts(stream, blocks, filters, partial, r);
}

}  // namespace mbc
