// Convolutions by mma.sync with maps and reductions in the epilogue: the kernel around the main loop of mma_gemm.cuh. Its
// sources and reductions are those of the wgmma kernels (smem_operands.cuh), and so are the states that it writes.
//
// Block      all tiles of the same filters whose numbers are `blocks` apart. The number of blocks is independent of the
//            GPU, so that sums have one order.
// Epilogue   a warp's own: results are rounded in registers, and the other operands come from global memory. The states of
//            a warp's threads are merged by shuffles, so that each thread keeps those of one filter from tile to tile. The
//            first stages of the next tile arrive meanwhile.
// Limit      bytes for most 1x1 convolutions, tensor cores for windows.
#pragma once

#include "mma_gemm.cuh"
#include "batch_statistics.cuh"
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

template <typename First>
__device__ inline const First& last_gemm(const MmaGemms<First>& gemms) { return gemms.first; }
template <typename First, typename Second>
__device__ inline const Second& last_gemm(const MmaGemms<First, Second>& gemms) { return gemms.second; }
template <typename G>
using LastGemm = std::remove_const_t<std::remove_reference_t<decltype(last_gemm(std::declval<G>()))>>;

struct MmaConv {
  int32_t pixels, filters, across, tiles;  // blocks of filters across; tiles of pixels

  MmaConv(int64_t pixels_, int64_t filters_, int tile_filters)
      : pixels(narrow(pixels_)), filters(narrow(filters_)), across(narrow(divide_up(filters_, tile_filters))),
        tiles(narrow(divide_up(pixels_, MMA_PIXELS))) {}
};

// A structure whose words are `f` of those of others.
template <typename V, typename F>
__device__ inline V by_words(const F& f, const V& a, const V& b) {
  constexpr int WORDS = sizeof(V) / 4;
  uint32_t words[2][WORDS];
  memcpy(words[0], &a, sizeof(V));
  memcpy(words[1], &b, sizeof(V));
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[0][i] = f(words[0][i], words[1][i]);
  V result;
  memcpy(&result, words[0], sizeof(V));
  return result;
}

// The filter of eight whose sum `add_lanes` leaves in a lane.
__device__ inline int32_t added_sum(int32_t lane) { return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2; }

// The sums of two threads as one; those of statistics are of distances from one element.
template <typename Running>
__device__ inline Running sum_of(const Running& a, const Running& b) {
  if constexpr (std::is_same_v<Running, BnBackwardReduction::State>)
    return {a.dot + b.dot, a.sum + b.sum};
  else
    return {a.shift, a.sum + b.sum, a.squares + b.squares};
}

// Adds the sums of 2 HALF filters of two threads whose lanes differ in bit 4 HALF: each gets those of half of them.
template <int HALF, typename Running>
__device__ inline Running add_lanes(const Running (&sums)[2 * HALF]) {
  const bool upper = (threadIdx.x & HALF * 4) != 0;
  const auto keep = [&](uint32_t low, uint32_t high) { return upper ? high : low; };
  const auto exchange = [&](uint32_t low, uint32_t high) { return __shfl_xor_sync(0xffffffffu, upper ? low : high, HALF * 4); };
  Running added[HALF];
#pragma unroll
  for (int j = 0; j < HALF; ++j)
    added[j] = sum_of(by_words(keep, sums[j], sums[j + HALF]), by_words(exchange, sums[j], sums[j + HALF]));
  if constexpr (HALF == 1)
    return added[0];
  else
    return add_lanes<HALF / 2>(added);
}

// The element from which all threads of a quad's column count, for reductions that begin with one.
template <typename T>
__device__ inline float common_first(const EpilogueStatistics<T>&, float first) {
  return __shfl_sync(0xffffffffu, first, threadIdx.x % 4);
}
template <typename R>
__device__ inline float common_first(const R&, float first) { return first; }

// The copies of one tile after another, for one GEMM.
template <typename Tile, typename G>
struct MmaTileCopies {
  MmaCopies<Tile, G> copies;
  KPosition k;
  int32_t count, left;  // stages of a tile, and those of this tile that are not copied yet

  __device__ MmaTileCopies(const G& gemm, int32_t first_pixel, int32_t first_filter)
      : copies(gemm, first_filter), count(gemm.stages()), left(count) {
    copies.locate(first_pixel);
  }
  __device__ void start(char* stage, bool there) const { copies.start(stage, k, there); }
  // Returns true if that was the tile's last stage.
  __device__ bool advance() {
    copies.gemm.pixels.advance(k);
    if (--left > 0) return false;
    left = count;
    k = {};
    return true;
  }
};

// The epilogue of eight filters of each of a thread's pixels. `first`: its first pixel; `result(i)`: that of the i-th
// eighth pixel from it. Operands of pixels outside the image are those of others, so that loads need no branch.
template <typename Tile, GemmResult M, typename T, typename S, typename R, typename Results>
__device__ inline void write_results(int32_t first, int32_t filter, const MmaConv& f, T* __restrict__ output, const S& source,
                                     const R& r, const Results& result, ThreadReduction<R>& sums) {
  constexpr int AT_ONCE = GEMMS<M> == 2 ? 2 : 4;  // pixels whose operands are in flight, as many as registers allow
  const int32_t left = filter < f.filters ? f.pixels - first : 0, last = max(f.pixels - 1 - first, 0);
  const int64_t begin = static_cast<int64_t>(min(first, f.pixels - 1)) * f.filters + min(filter, f.filters - 8);
#pragma unroll
  for (int i = 0; i < MMA_ROWS; i += AT_ONCE) {
    const auto at = [&](int j) { return begin + static_cast<int64_t>(min((i + j) * 8, last)) * f.filters; };
    decltype(source.template fetch<8>(begin)) fetched[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const Held<T, 8> x = result(i + j, 0), gradient = GEMMS<M> == 2 ? result(i + j, 1) : x;
      S with_results = source;
      // A result has the index `at`, too: the pointer is that of the tensor that would begin so far before it.
      if constexpr (COMPUTES_X<M>) x_operand(with_results) = reinterpret_cast<const T*>(&x) - at(j);
      if constexpr (COMPUTES_GRADIENT<M>) gradient_operand(with_results) = reinterpret_cast<const T*>(&gradient) - at(j);
      fetched[j] = with_results.template fetch<8>(at(j));
    }
    if constexpr (REDUCES<R>) {
#pragma unroll
      for (int k = 0; k < 8 && i == 0; ++k)
        sums.running[k] = r.begin(common_first(r, source.template first<8>(fetched[0], k)));
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if ((i + j) * 8 < left) {
        store_gemm_result<M>(source, output + at(j), fetched[j]);
        sums.add(r, source, fetched[j], at(j));
      }
  }
}

// A thread's i-th result of a group of 32 filters: eight neighbouring ones of a pixel, rounded. By all threads of the warp.
template <typename Tile, typename T, bool BACKWARD>
__device__ inline Held<T, 8> rounded_result(const typename Tile::Sums& sums, int group, int i) {
  Held<T, 8> result;
#pragma unroll
  for (int n = 0; n < 4; ++n) result.words[n] = rounded_word<T>(sums[i / 2][group * 4 + n] + i % 2 * 2);
  if constexpr (BACKWARD) transpose_quad(result.words);
  return result;
}

// `output`: where the result is stored, or null. `partial`: the states of each block's filters.
template <typename Tile, GemmResult M, typename T, typename G, typename S, typename R>
__global__ void __launch_bounds__(MMA_THREADS, Tile::BLOCKS)
    mma_conv(G gemms, T* __restrict__ output, S source, R r, typename R::State* partial, MmaConv f) {
  MBC_DYNAMIC_SHARED(shared);
  constexpr bool TWO = GEMMS<M> == 2;
  const int32_t block = static_cast<int32_t>(blockIdx.x) / f.across, step = static_cast<int32_t>(gridDim.x) / f.across;
  const int32_t first_filter = static_cast<int32_t>(blockIdx.x) % f.across * Tile::FILTERS;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int32_t down = warp / MMA_WARPS_ACROSS, warp_pixel = down * MMA_WARP_PIXELS;
  const int32_t warp_filter = warp % MMA_WARPS_ACROSS * Tile::WARP_FILTERS;
  // Reductions walk from the last tile to the first, as in channel_reduce.cuh.
  const auto first_of = [&](int32_t tile) { return (REDUCES<R> ? f.tiles - 1 - tile : tile) * MMA_PIXELS; };

  using First = decltype(gemms.first);
  using Last = LastGemm<G>;
  MmaTileCopies<Tile, First> first(gemms.first, first_of(block), first_filter);
  const MmaFragments<T, Tile, First::BACKWARD> fragments(warp_pixel, warp_filter);
  [[maybe_unused]] MmaTileCopies<Tile, Last> second(last_gemm(gemms), first_of(block), first_filter);
  [[maybe_unused]] const MmaFragments<T, Tile, Last::BACKWARD> second_fragments(warp_pixel, warp_filter);
  int32_t ahead = block;  // the tile whose stages are copied, of the second GEMM if `is_second`
  bool is_second = false;
  const MmaAhead copies{[&](char* stage) {
                          if (TWO && is_second)
                            second.start(stage, ahead < f.tiles);
                          else
                            first.start(stage, ahead < f.tiles);
                        },
                        [&] {
                          const bool ends = TWO && is_second ? second.advance() : first.advance();
                          if (!ends) return;
                          is_second = TWO && !is_second;
                          if (is_second) return;
                          ahead += step;
                          first.copies.locate(first_of(ahead));
                          if (TWO) second.copies.locate(first_of(ahead));
                        }};

  // Constants of filters of several words: of 32 filters, a lane keeps those of one.
  constexpr bool BY_LANE = !std::is_same_v<R, NoReduction> && sizeof(typename R::Channel) > sizeof(float);
  typename R::Channel constants[Tile::GROUPS] = {};
  typename R::State kept[Tile::GROUPS] = {};
#pragma unroll
  for (int g = 0; g < Tile::GROUPS; ++g) {
    const int32_t filter = first_filter + warp_filter + g * 32 + lane;
    if (BY_LANE && filter < f.filters) constants[g] = r.load(filter);
  }
  char* const stages = reinterpret_cast<char*>(shared);
  auto* const x_results = reinterpret_cast<Held<T, 8>*>(stages + Tile::STAGES_BYTES) + threadIdx.x;
  MmaStages<Tile::STAGES, Tile::STAGE_BYTES> ring{stages};
  ring.start_first(copies);
  for (int32_t tile = block; tile < f.tiles; tile += step) {
    typename Tile::Sums sums = {};
    if constexpr (TWO) {
      typename Tile::Sums x = {};
      ring.multiply(first.count, fragments, x, copies);
#pragma unroll
      for (int i = 0; i < Tile::GROUPS * MMA_ROWS; ++i)
        x_results[i * MMA_THREADS] = rounded_result<Tile, T, First::BACKWARD>(x, i / MMA_ROWS, i % MMA_ROWS);
      ring.multiply(second.count, second_fragments, sums, copies);
    } else {
      ring.multiply(first.count, fragments, sums, copies);
    }
    const int32_t pixel = first_of(tile) + warp_pixel;
#pragma unroll
    for (int g = 0; g < Tile::GROUPS; ++g) {
      const int32_t filter = first_filter + warp_filter + g * 32 + lane % 4 * 8;
      ThreadReduction<R> reduction([&](int j) -> typename R::Channel {
        if constexpr (BY_LANE)
          return by_words([&](uint32_t word, uint32_t) { return __shfl_sync(0xffffffffu, word, lane % 4 * 8 + j); }, constants[g], constants[g]);
        else
          return r.load(min(filter, f.filters - 8) + j);
      });
      const auto result = [&](int i, int gemm) {
        if (gemm < GEMMS<M> - 1) return x_results[(g * MMA_ROWS + i) * MMA_THREADS];
        return rounded_result<Tile, T, Last::BACKWARD>(sums, g, i);
      };
      write_results<Tile, M>(pixel + lane / 4, filter, f, output, source, r, result, reduction);
      if constexpr (REDUCES<R>) {
        const int32_t count = min(max(f.pixels - pixel, 0), MMA_WARP_PIXELS);
        const typename R::State both[2] = {kept[g], r.thread_state(typename R::Channel{}, add_lanes<4>(reduction.running), count)};
        kept[g] = r.combine(2, [&](unsigned i) { return both[i]; });
      }
    }
  }
  if constexpr (REDUCES<R>) {
    auto* const states = reinterpret_cast<typename R::State*>(stages);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int g = 0; g < Tile::GROUPS; ++g)
      states[down * Tile::FILTERS + warp_filter + g * 32 + lane % 4 * 8 + added_sum(lane)] = kept[g];
    __syncthreads();
    for (int32_t i = threadIdx.x; i < Tile::FILTERS && first_filter + i < f.filters; i += MMA_THREADS)
      partial[static_cast<int64_t>(block) * f.filters + first_filter + i] =
          r.combine(MMA_WARPS_DOWN, [&](unsigned k) { return states[static_cast<int>(k) * Tile::FILTERS + i]; });
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
    run(MmaTile<64, 4, 3>());
  else
    run(MmaTile<128, 3, 2>());
  if constexpr (REDUCES<R>) merge_all_parts(stream, blocks, filters, partial, r);
}

}  // namespace mbc
