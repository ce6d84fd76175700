// Changes of layout (channels first, channels last) and of element type, and both at once.
//
// Bytes      the tensor in once and out once.
// Kernels    same layout: `convert_type`, up to 16 bytes for each thread at a time. Otherwise a transposition. If vectors
//            divide both extents, it is in registers, 8 x 8 elements of two bytes or 4 x 4 of four for each thread, read
//            and written in segments of at least 64 bytes; otherwise it is by tiles of 64 x 32 in shared memory (33
//            columns, so that a column's elements are in different banks). 256 threads. With at most 8 channels a thread
//            moves a pixel, or several pixels of three channels that become channels last.
// Limit      memory bandwidth.
#include "images.cuh"
#include "move_arguments.h"

namespace mbc {

constexpr int FEW_CHANNELS = 8;  // with fewer channels a tile of 32 x 32 would be mostly empty

template <typename To, typename From>
__device__ inline To convert(From x) { return from_float<To>(to_float(x)); }
template <>
__device__ inline uint8_t convert<uint8_t, uint8_t>(uint8_t x) { return x; }
template <>
__device__ inline uint16_t convert<uint16_t, uint16_t>(uint16_t x) { return x; }
// int32 is converted, too: its bits must not pass through arithmetic.
template <>
__device__ inline uint32_t convert<uint32_t, uint32_t>(uint32_t x) { return x; }

// Elements of a vector of at most 16 bytes on either side.
template <typename From, typename To>
constexpr int WIDE = 16 / static_cast<int>(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

template <typename From, typename To>
__global__ void convert_type(const From* x, To* y, int64_t vectors, int64_t elements) {
  constexpr int N = WIDE<From, To>;
  const int64_t stride = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    const Vec<From, N> a = load<N>(x + i * N);
    Vec<To, N> b;
#pragma unroll
    for (int j = 0; j < N; ++j) b.v[j] = convert<To>(a.v[j]);
    store(y + i * N, b);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride) y[e] = convert<To>(x[e]);
}

// [batches, down, across] -> [batches, across, down] in registers: a thread reads ND rows of NA elements and writes NA
// of ND. As many lanes of a warp are side by side as read 64 bytes of a row, the others below one another:
//
//               NA elements  NA elements  ..
//   ND rows     lane 0       lane 1       .. lane LA - 1
//   ND rows     lane LA      lane LA + 1  ..
template <typename From, typename To, int NA, int ND>
struct HeldTile {
  static constexpr int LA = 64 / static_cast<int>(NA * sizeof(From)), LD = 32 / LA, WARPS = THREADS / 32;
};

template <typename From, typename To, int NA, int ND>
__global__ void transpose_held(const From* x, To* y, int64_t warps, int64_t down, int64_t across, int64_t tiles_down,
                               int64_t tiles_across) {
  using Tile = HeldTile<From, To, NA, ND>;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * Tile::WARPS + threadIdx.y;
  const int lane_down = static_cast<int>(threadIdx.x) / Tile::LA, lane_across = static_cast<int>(threadIdx.x) % Tile::LA;
  const int64_t line = quotient(warp, tiles_across), batch = quotient(line, tiles_down);
  const int64_t d = ((line - batch * tiles_down) * Tile::LD + lane_down) * ND;
  const int64_t a = ((warp - line * tiles_across) * Tile::LA + lane_across) * NA;
  if (warp >= warps || d >= down || a >= across) return;
  const int64_t base = batch * down * across;
  Held<From, NA> rows[ND];
#pragma unroll
  for (int i = 0; i < ND; ++i) rows[i] = hold<NA>(x + base + (d + i) * across + a);
#pragma unroll
  for (int j = 0; j < NA; ++j) {
    const auto column = hold_each<To, ND>([&](int i) { return convert<To>(rows[i][j]); });
    store_held(y + base + (a + j) * down + d, column);
  }
}

// Transposition through tiles in shared memory.
constexpr int TILE_DOWN = 64, TILE_ACROSS = 32;

template <typename From, typename To>
__global__ void transpose(const From* x, To* y, int64_t batches, int64_t down, int64_t across, int64_t tiles_across,
                          int64_t tiles) {
  __shared__ From tile[TILE_DOWN][TILE_ACROSS + 1];  // columns fall into different banks
  for (int64_t batch = blockIdx.y; batch < batches; batch += gridDim.y) {
    const int64_t base = batch * down * across;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const int64_t line = quotient(t, tiles_across), d0 = line * TILE_DOWN, a0 = (t - line * tiles_across) * TILE_ACROSS;
      const int lane = static_cast<int>(threadIdx.x), y0 = static_cast<int>(threadIdx.y);
#pragma unroll
      for (int i = 0; i < TILE_DOWN; i += 8)
        if (d0 + y0 + i < down && a0 + lane < across) tile[y0 + i][lane] = x[base + (d0 + y0 + i) * across + a0 + lane];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < TILE_ACROSS; i += 8) {
        const int64_t at = base + (a0 + y0 + i) * down + d0;
#pragma unroll
        for (int k = lane; k < TILE_DOWN; k += 32)
          if (a0 + y0 + i < across && d0 + k < down) y[at + k] = convert<To>(tile[k][y0 + i]);
      }
      __syncthreads();
    }
  }
}

// Transposition of few channels (images): a thread reads a pixel and writes it.
template <typename From, typename To>
__global__ void transpose_few(const From* x, To* y, int64_t pixels, int channels, bool to_last, Steps steps) {
  const int64_t stride = thread_count(), inner = steps.inner;
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < pixels; i += stride, at.advance(steps)) {
    const int64_t first = at.outer * channels * inner + at.inner, last = i * channels;
    for (int c = 0; c < channels; ++c) {
      if (to_last)
        y[last + c] = convert<To>(x[first + c * inner]);
      else
        y[first + c * inner] = convert<To>(x[last + c]);
    }
  }
}

// Images of three colours that become channels last, as inputs do in every step: a thread reads some pixels of each
// colour and writes them one after another.
template <typename From, typename To>
__global__ void interleave(const From* x, To* y, int64_t vectors, Steps steps) {
  constexpr int C = 3, N = WIDE<From, To>;
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < vectors; i += stride, at.advance(steps)) {
    Vec<From, N> from[C];
#pragma unroll
    for (int c = 0; c < C; ++c) from[c] = load<N>(x + ((at.outer * C + c) * steps.inner + at.inner) * N);
#pragma unroll
    for (int part = 0; part < C; ++part) {
      Vec<To, N> to;
#pragma unroll
      for (int j = 0; j < N; ++j) to.v[j] = convert<To>(from[(part * N + j) % C].v[(part * N + j) / C]);
      store(y + (i * C + part) * N, to);
    }
  }
}

template <typename From, typename To>
bool interleaved(const MbcCall& call, const ConvertArguments& a) {
  constexpr int N = WIDE<From, To>;
  const From* x = in<From>(call, 0);
  To* y = out<To>(call, 1);
  const bool images = a.channels == 3 && a.from_layout == MBC_CHANNELS_FIRST && a.to_layout == MBC_CHANNELS_LAST;
  if (!images || a.inner % N != 0 || !aligned(x, 16) || !aligned(y, 16)) return false;
  const int64_t vectors = a.rows * a.inner / N;
  const unsigned blocks = blocks_for(vectors);
  const Steps steps(a.inner / N, 1, static_cast<int64_t>(blocks) * THREADS);
  MBC_LAUNCH((interleave<From, To>), blocks, THREADS, call.stream, x, y, vectors, steps);
  return true;
}

template <int NA, int ND, typename From, typename To>
bool transposed_held(cudaStream_t stream, const From* x, To* y, int64_t batches, int64_t down, int64_t across) {
  using Tile = HeldTile<From, To, NA, ND>;
  if (down % ND != 0 || across % NA != 0 || !aligned(x, 16) || !aligned(y, 16)) return false;
  const int64_t tiles_down = divide_up(down, Tile::LD * ND), tiles_across = divide_up(across, Tile::LA * NA);
  const int64_t warps = batches * tiles_down * tiles_across;
  MBC_LAUNCH((transpose_held<From, To, NA, ND>), static_cast<unsigned>(divide_up(warps, Tile::WARPS)),
             dim3(32, Tile::WARPS), stream, x, y, warps, down, across, tiles_down, tiles_across);
  return true;
}

// If vectors divide both extents. With elements of two bytes also shorter vectors of pixels, because images of 14 x 14
// pixels have only a multiple of four.
template <typename From, typename To>
bool transposed_in_registers(cudaStream_t stream, const From* x, To* y, int64_t batches, int64_t down, int64_t across,
                             bool to_last) {
  constexpr int N = WIDE<From, To>;
  if constexpr (N > 8) return false;
  else if (transposed_held<N, N>(stream, x, y, batches, down, across)) return true;
  else if constexpr (N < 8) return false;
  else if (to_last) return transposed_held<N / 2, N>(stream, x, y, batches, down, across);
  else return transposed_held<N, N / 2>(stream, x, y, batches, down, across);
}

template <typename From, typename To>
const char* run_convert(const MbcCall& call, const ConvertArguments& a) {
  const From* x = in<From>(call, 0);
  To* y = out<To>(call, 1);
  const int64_t elements = a.rows * a.channels * a.inner;
  if (a.from_layout == a.to_layout || a.channels == 1 || a.inner == 1) {
    constexpr int N = WIDE<From, To>;
    const int64_t vectors = aligned(x, 16) && aligned(y, 16) ? elements / N : 0;
    MBC_LAUNCH((convert_type<From, To>), blocks_for(vectors > 0 ? vectors : elements), THREADS, call.stream, x, y,
               vectors, elements);
  } else if (a.channels <= FEW_CHANNELS) {
    const unsigned blocks = blocks_for(a.rows * a.inner);
    const Steps steps(a.inner, 1, static_cast<int64_t>(blocks) * THREADS);
    MBC_LAUNCH((transpose_few<From, To>), blocks, THREADS, call.stream, x, y, a.rows * a.inner,
               static_cast<int>(a.channels), a.to_layout == MBC_CHANNELS_LAST, steps);
  } else {
    const bool to_last = a.to_layout == MBC_CHANNELS_LAST;
    const int64_t down = to_last ? a.channels : a.inner, across = to_last ? a.inner : a.channels;
    if (transposed_in_registers(call.stream, x, y, a.rows, down, across, to_last)) return launched();
    const int64_t tiles_across = divide_up(across, TILE_ACROSS), tiles = tiles_across * divide_up(down, TILE_DOWN);
    const dim3 grid(static_cast<unsigned>(tiles < 65535 ? tiles : 65535),
                    static_cast<unsigned>(a.rows < 65535 ? a.rows : 65535));
    MBC_LAUNCH((transpose<From, To>), grid, dim3(32, 8), call.stream, x, y, a.rows, down, across, tiles_across, tiles);
  }
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_convert(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConvertArguments>(call);
  if (a.from_type == MBC_UINT8 && a.to_type == MBC_UINT8) return run_convert<uint8_t, uint8_t>(call, a);
  if (a.from_type == a.to_type && (a.from_type == MBC_INT32 || a.from_type == MBC_FP32))
    return interleaved<uint32_t, uint32_t>(call, a) ? launched() : run_convert<uint32_t, uint32_t>(call, a);
#if MBC_WORKING != 0
  if (a.from_type == MBC_FP32 && a.to_type == MBC_WORKING) return run_convert<float, MbcWorking>(call, a);
  if (a.from_type == MBC_WORKING && a.to_type == MBC_FP32) return run_convert<MbcWorking, float>(call, a);
  if (a.from_type == MBC_WORKING && a.to_type == MBC_WORKING) return run_convert<uint16_t, uint16_t>(call, a);
#endif
  return "element type is not in this library";
}

extern "C" const char* mbc_cast(const MbcCall& call) {
  using namespace mbc;
#if MBC_WORKING != 0
  const auto& a = arguments<ConvertArguments>(call);
  if (a.from_type == MBC_FP32 && a.to_type == MBC_WORKING && interleaved<float, MbcWorking>(call, a)) return launched();
#endif
  return mbc_convert(call);
}
