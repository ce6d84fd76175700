// Filter gradient of stem convolutions of volumes (stem_volume.cuh).
//
// GEMM       M = elements of a filter, N = filters, K = output voxels, split over `parts` blocks (split-K) that
//            `add_parts` adds in order.
// Tile       16 lines x 32 columns, one output plane after another, x 32 or 16 filters x all elements of a filter. A warp
//            has two lines: four steps of K = 16 in each plane. Warps are added as a tree, once.
// Warps      8, all equal: each copies its own gradients (cp.async) a plane ahead, and reads them by ldmatrix.trans; all
//            read the plane of the image after the next one. Only planes of the image need a barrier of the block.
// Shared     gradients of eight steps a warp, 64 KiB for 32 filters; four planes of the image (12,096 bytes for one
//            channel), and a table of the words under a filter.
// Registers  at most 128, for two blocks on a multiprocessor.
// Limit      the bytes of the gradients: decision 098.
//
// Thread (g, t) = (lane / 4, lane % 4) holds, for each 16 elements of a filter:
//
//   A (elements)    k = 2t, 2t+1   2t+8, 2t+9          D            filters   8j + 2t     8j + 2t + 1
//     element g       a[0]           a[2]                element g           d[j][0]     d[j][1]
//     element g + 8   a[1]           a[3]                element g + 8       d[j][2]     d[j][3]
#include "split_k.cuh"
#include "stem_volume.cuh"

namespace mbc {

template <typename T, int CHANNELS, int TILES>
struct StemGradients {
  using Planes = StemPlanes<T, CHANNELS, CHANNELS>;
  static constexpr int ELEMENTS = SWEEP_TAPS * SWEEP_TAPS * Planes::RUN, ROWS = (ELEMENTS + 15) / 16;
  static constexpr int STEPS = STEM_LINES * STEM_PIECES, STAGE = 16 * TILES;  // of a warp and plane; in units of 16 bytes
  uint4 stages[STEM_WARPS][2][STEPS][STAGE];  // of a plane, and of the next one
  StemWords<Planes, ROWS * 16> words;
  uint32_t image[Planes::WORDS];

  // Of eight filters of a voxel, in a stage; swizzled so that eight neighbouring voxels have no bank conflicts.
  __device__ static int32_t offset(int32_t voxel, int32_t eight) { return voxel * TILES + (eight ^ voxel / (8 / TILES) % TILES); }
};

// Adds the sums of all warps as a tree: those of warp 0 are complete.
template <int N>
__device__ inline void add_warps(float (&sums)[N][4], float* shared) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
#pragma unroll
  for (int half = STEM_WARPS / 2; half > 0; half /= 2) {
    float* const at = shared + warp % half * N * 128 + threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < 4 * N; ++v)
      if (warp >= half && warp < 2 * half) at[v * 32] = sums[v / 4][v % 4];
    __syncthreads();
#pragma unroll
    for (int v = 0; v < 4 * N; ++v)
      if (warp < half) sums[v / 4][v % 4] += at[v * 32];
  }
}

template <typename T, int CHANNELS, int TILES>
__global__ void __launch_bounds__(STEM_THREADS, 2)
    stem_volume_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial, StemVolume f) {
  using Shared = StemGradients<T, CHANNELS, TILES>;
  using Planes = typename Shared::Planes;
  constexpr int ROWS = Shared::ROWS;
  static_assert(STEM_WARPS / 2 * ROWS * TILES * 512 <= sizeof(Shared::stages), "sums of half of the warps");
  MBC_DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int32_t first = static_cast<int32_t>(blockIdx.y) * TILES * 8;
  shared.words.fill(Planes::RUN, 1);
  const uint32_t* const voxel = shared.image + warp * STEM_LINES * Planes::PITCH + 2 * t * CHANNELS;
  float sums[ROWS * TILES][4] = {};
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const SweepTile tile = f.tile(number);
    const int32_t line = tile.line + warp * STEM_LINES, column = tile.column + lane / TILES;
    const T* next = dy + (tile.row * f.out_planes + tile.begin) * f.plane_elements() + first + lane % TILES * 8;
    // Starts the copy of 16 voxels of the next plane, or of none.
    const auto start = [&](int32_t plane, int32_t step) {
      if (tile.begin + plane < tile.end) {
        const T* const voxels = next + (line + step / STEM_PIECES) * f.line_elements() + column * f.filters;
#pragma unroll
        for (int i = 0; i < Shared::STAGE / 32; ++i) {
          const int32_t right = step % STEM_PIECES * 16 + i * (32 / TILES);
          const bool inside = line + step / STEM_PIECES < f.out_lines && column + right < f.out_columns;
          cp_async_16(shared.stages[warp][plane % 2][step] + Shared::offset(lane / TILES, lane % TILES) + i * 32,
                      inside ? voxels + right * f.filters : dy, inside);
        }
      }
      cp_async_commit();
      if (step + 1 == Shared::STEPS) next += f.plane_elements();
    };
    Planes planes(x, shared.image, f, tile);
    __syncthreads();  // the tile before this one has been read
#pragma unroll
    for (int step = 0; step < Shared::STEPS; ++step) start(0, step);
    planes.begin();
    for (int32_t plane = 0; plane < tile.end - tile.begin; ++plane) {
      __syncthreads();  // the planes under this one have arrived, and those under the one before have been read
      const bool more = tile.begin + plane + 1 < tile.end;
      const uint32_t* from[ROWS][2];
#pragma unroll
      for (int h = 0; h < 2 * ROWS; ++h) from[h / 2][h % 2] = voxel + shared.words.of(plane)[h * 8 + g];
#pragma unroll 1
      for (int32_t row = 0; row < STEM_LINES; ++row) {
        if (more) planes.fetch(plane + SWEEP_TAPS, row);
#pragma unroll
        for (int piece = 0; piece < STEM_PIECES; ++piece) {
          const int32_t step = row * STEM_PIECES + piece, at = row * Planes::PITCH + piece * 16 * CHANNELS;
          start(plane + 1, step);
          cp_async_wait<Shared::STEPS>();
          __syncwarp();
          uint32_t b[TILES / 2][4];
#pragma unroll
          for (int pair = 0; pair < TILES / 2; ++pair)
            ldmatrix_x4_trans(b[pair], shared.stages[warp][plane % 2][step] + Shared::offset(lane % 16, 2 * pair + lane / 16));
#pragma unroll
          for (int m = 0; m < ROWS; ++m) {
            const uint32_t a[4] = {from[m][0][at], from[m][1][at], from[m][0][at + 8 * CHANNELS], from[m][1][at + 8 * CHANNELS]};
#pragma unroll
            for (int j = 0; j < TILES; ++j) mma_m16n8k16<T>(sums[m * TILES + j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
        if (more) planes.keep(plane + SWEEP_TAPS, row);
      }
    }
  }
  cp_async_wait<0>();
  add_warps(sums, reinterpret_cast<float*>(shared.stages));
  float* const part = partial + static_cast<int64_t>(blockIdx.x) * f.filters * Shared::ELEMENTS;
#pragma unroll
  for (int v = 0; v < ROWS * TILES * 4; ++v) {
    const int32_t element = v / 4 / TILES * 16 + g + v % 4 / 2 * 8, filter = first + v / 4 % TILES * 8 + 2 * t + v % 2;
    if (warp == 0 && element < Shared::ELEMENTS) part[filter * Shared::ELEMENTS + element] = sums[v / 4][v % 4];
  }
}

}  // namespace mbc

// Accesses: image, gradient of the result, gradient of the filters, workspace.
extern "C" const char* mbc_stem_volume_backward_filter(const MbcCall& call) {
  using namespace mbc;
  return with_working_type(MBC_WORKING, [&](auto of) -> const char* {
    using T = decltype(of);
    const auto& a = arguments<StemVolumeArguments>(call);
    const StemVolume f(a);
    if (const char* problem = unaligned(call)) return problem;
    return with_stem_channels(a.channels, [&](auto channels) {
      const auto run = [&](auto tiles) {
        constexpr int CHANNELS = decltype(channels)::value, TILES = decltype(tiles)::value;
        using Shared = StemGradients<T, CHANNELS, TILES>;
        constexpr int BYTES = sizeof(Shared);
        const dim3 grid(static_cast<unsigned>(a.parts), static_cast<unsigned>(a.filters / (8 * TILES)));
        MBC_LAUNCH_SHARED((stem_volume_filter<T, CHANNELS, TILES>), grid, STEM_THREADS, BYTES, call.stream, in<T>(call, 0),
                          in<T>(call, 1), out<float>(call, 3), f);
        add_parts(call.stream, out<float>(call, 3), out<float>(call, 2), a.filters * Shared::ELEMENTS, a.parts, a.accumulate != 0);
        return launched();
      };
      const bool wide = decltype(channels)::value <= 2 && a.filters % 32 == 0;
      return wide ? run(std::integral_constant<int, decltype(channels)::value <= 2 ? 4 : 2>()) : run(std::integral_constant<int, 2>());
    });
  });
}
