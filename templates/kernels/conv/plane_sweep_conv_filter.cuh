// Filter gradient of convolutions with 3 x 3 x 3 filters, or 3 x 3 for images, and a stride of one, in bf16 and fp16
// (decision 085). Channels last; channels and filters are multiples of 32.
//
// GEMM       M = 2 planes of a filter x 32 filters, N = lines of a filter x 32 channels, K = output voxels, split over
//            `parts` blocks (split-K) that `add_parts` adds in order.
// Tile       32 filters x 32 channels x all taps; K = 128 voxels of a plane of a tile (plane_sweep.cuh). A plane of the
//            image is multiplied by three planes of gradients; its lines are side by side in shared memory, so that an
//            instruction covers the filter's three lines.
// Warps      384 threads. Warpgroup 0 is the producer: planes of the image and of gradients with cp.async, up to six
//            ahead. Warpgroup 1 computes the filters' first and second planes, warpgroup 2 the third: wgmma m64nNk16,
//            gradients (A) in registers through ldmatrix.trans, voxels (B) in shared memory.
// Shared     8 stages: a plane of the image with halo, 11,520 bytes (images: 8,320), and one of gradients, 8,192 bytes.
// Registers  88 for a producer, 208 for a consumer thread (setmaxnreg): 144 accumulators.
// Limit      tensor cores: 6 instructions of N = 96 for 9 taps of a plane, where 4.5 would do: 75 %. Each takes 48
//            cycles, and 24 cycles of reads from shared memory.
//
// Thread (g, t) = (lane / 4, lane % 4) of warp w holds, for each of the filter's columns:
//
//   A (filters)                k = 2t, 2t+1   2t+8, 2t+9        D        line and channel   8j + 2t    8j + 2t + 1
//     filter 16(w % 2) + g        a[0]          a[2]              16(w % 2) + g              d[j][0]    d[j][1]
//     filter 16(w % 2) + g + 8    a[1]          a[3]              16(w % 2) + g + 8          d[j][2]    d[j][3]
#pragma once

#include "plane_sweep.cuh"
#include "plane_sweep_conv_arguments.h"
#include "split_k.cuh"

namespace mbc {

constexpr int FILTER_STAGES = 8, FILTER_CHANNELS = 32;  // as in mbc/kernels/cuda/conv/plane_sweep_conv.py
constexpr int FILTER_PRODUCER_REGISTERS = 88;
static_assert(passes_registers(FILTER_PRODUCER_REGISTERS, CONSUMER_REGISTERS));

struct PlaneSweepFilter : PlaneSweep {
  static constexpr int EIGHTS = FILTER_CHANNELS / 8, STEPS = SWEEP_VOXELS / 16;

  SweptTensor image, gradient;
  int32_t image_bytes, stage_bytes, blocks_of_channels, blocks;  // blocks of channels; of filters and channels

  explicit PlaneSweepFilter(const PlaneSweepFilterArguments& a)
      : PlaneSweep(a, a.segment_planes), image(a, *this), gradient(*this), image_bytes(image.box_bytes(EIGHTS)),
        stage_bytes(image_bytes + gradient.box_bytes(EIGHTS)), blocks_of_channels(channels / FILTER_CHANNELS),
        blocks(blocks_of_channels * filters / FILTER_CHANNELS) {}
  __device__ int32_t first_channel() const { return static_cast<int32_t>(blockIdx.x) % blocks_of_channels * FILTER_CHANNELS; }
  __device__ int32_t first_filter() const {
    return static_cast<int32_t>(blockIdx.x) % blocks / blocks_of_channels * FILTER_CHANNELS;
  }
};

// A stage holds a plane of the image and the plane of gradients of the same number; planes that do not exist are zeros.
template <typename T, typename Prologue>
__device__ inline void produce_pairs_of_planes(const T* __restrict__ x, const T* __restrict__ dy, char* stages, const Prologue& prologue,
                                               Pipeline<FILTER_STAGES>& pipeline, const PlaneSweepFilter& f) {
  typename Prologue::template Thread<T, f.EIGHTS, FILTER_STAGES> thread(prologue, pipeline, stages, f.stage_bytes, f.first_channel());
  int32_t iteration = 0;
  for (int64_t number = blockIdx.x / f.blocks; number < f.tiles; number += gridDim.x / f.blocks) {
    const SweepTile tile = f.tile(number);
    const BoxCopy<T, f.EIGHTS> image(x, f.image, tile, f.first_channel()), gradient(dy, f.gradient, tile, f.first_filter());
    thread.begin(tile, image);
    for (int32_t plane = tile.begin; plane < tile.end + SWEEP_TAPS - 1; ++plane, ++iteration) {
      char* const stage = stages + iteration % FILTER_STAGES * f.stage_bytes;
      const int32_t read = plane - f.pad_planes;
      pipeline.producer_acquire(iteration);
      image.start(read, read >= 0 && read < f.planes, stage);
      gradient.start(plane, plane < tile.end, stage + f.image_bytes);
      thread.started(iteration, image, read >= 0 && read < f.planes);
    }
  }
  thread.finish();
}

// LINES: lines of a filter. A warp computes plane `tap` of the filters, or none if `tap` is SWEEP_TAPS.
template <typename T, int LINES>
__device__ inline void accumulate_planes(float (&sums)[SWEEP_TAPS][LINES * FILTER_CHANNELS / 8][4], const char* stages, int32_t tap,
                                         Pipeline<FILTER_STAGES>& pipeline, const PlaneSweepFilter& f) {
  // One ldmatrix reads four matrices of 8 voxels x 8 filters: the row whose address this thread supplies.
  const int32_t lane = threadIdx.x % 32, eight = threadIdx.x / 32 % 2 * 2 + lane / 8 % 2;
  const int32_t image_pitch = f.image.group_pitch(f.EIGHTS), gradient_pitch = f.gradient.group_pitch(f.EIGHTS);
  const char* const gradients =
      stages + f.image_bytes + lane / 16 * gradient_pitch + eight * f.gradient.chunk_pitch() + lane % 8 * 16;
  const CoreMatrixDescriptor voxels({stages, f.image.chunk_pitch(), image_pitch});
  int32_t iteration = 0;
  for (int64_t number = blockIdx.x / f.blocks; number < f.tiles; number += gridDim.x / f.blocks) {
    const SweepTile tile = f.tile(number);
    for (int32_t plane = tile.begin; plane < tile.end + SWEEP_TAPS - 1; ++plane, ++iteration) {
      pipeline.consumer_wait(iteration);
      fence_proxy_async();
      uint32_t a[f.STEPS][4] = {};
      if (tap < SWEEP_TAPS && plane - tap >= tile.begin && plane - tap < tile.end) {
        const char* const rows = gradients + (iteration - tap) % FILTER_STAGES * f.stage_bytes;
#pragma unroll
        for (int step = 0; step < f.STEPS; ++step)
          ldmatrix_x4_trans(a[step], reinterpret_cast<const uint4*>(rows + 2 * step * gradient_pitch));
      }
      const CoreMatrixDescriptor stage = voxels.ahead(warp_uniform(iteration % FILTER_STAGES * f.stage_bytes));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < f.STEPS; ++step)
#pragma unroll
        for (int column = 0; column < SWEEP_TAPS; ++column)
          wgmma_rs<true, T>(sums[column], a[step], stage.ahead(2 * step * image_pitch + column * 16), true);
      wgmma_commit();
#pragma unroll
      for (int column = 0; column < SWEEP_TAPS; ++column) wgmma_wait(sums[column]);
      if (plane - tile.begin >= SWEEP_TAPS - 1) pipeline.consumer_release(iteration - (SWEEP_TAPS - 1));
    }
    for (int32_t before = SWEEP_TAPS - 1; before > 0; --before) pipeline.consumer_release(iteration - before);
  }
}

template <typename T, int LINES, typename Prologue>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    plane_sweep_conv_filter(
        const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial, PlaneSweepFilter f, Prologue prologue) {
  MBC_DYNAMIC_SHARED(shared);
  __shared__ Pipeline<FILTER_STAGES> pipeline;
  char* const stages = reinterpret_cast<char*>(shared);
  if (threadIdx.x == 0) pipeline.start(WARPGROUP);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    setmaxnreg_dec<FILTER_PRODUCER_REGISTERS>();
    produce_pairs_of_planes(x, dy, stages, prologue, pipeline, f);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int32_t lane = threadIdx.x % 32, warp = static_cast<int32_t>(threadIdx.x) / 32 - WARPGROUP / 32, tap = warp_uniform(warp / 2);
    float sums[SWEEP_TAPS][LINES * FILTER_CHANNELS / 8][4] = {};
    accumulate_planes<T, LINES>(sums, stages, tap, pipeline, f);
    if (tap == SWEEP_TAPS) return;
    const int32_t filter = f.first_filter() + warp % 2 * 16 + lane / 4;
    float* const part = partial + static_cast<int64_t>(blockIdx.x / f.blocks) * f.filters * SWEEP_TAPS * f.taps * f.channels;
#pragma unroll
    for (int column = 0; column < SWEEP_TAPS; ++column)
#pragma unroll
      for (int j = 0; j < LINES * FILTER_CHANNELS / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t at = ((filter + 8 * h) * SWEEP_TAPS + tap) * f.taps + j * 8 / FILTER_CHANNELS * SWEEP_TAPS + column;
          const int32_t channel = f.first_channel() + j * 8 % FILTER_CHANNELS + lane % 4 * 2;
          store(part + at * f.channels + channel, Vec<float, 2>{sums[column][j][2 * h], sums[column][j][2 * h + 1]});
        }
  }
}

template <typename T, typename Prologue>
const char* run_plane_sweep_filter(const MbcCall& call, const PlaneSweepFilterArguments& a, const T* x, const T* dy, float* dw,
                                   float* partial, const Prologue& prologue) {
  if (const char* problem = unaligned(call)) return problem;
  const PlaneSweepFilter f(a);
  run_with_one_of<1, SWEEP_TAPS>(a.flat ? 1 : SWEEP_TAPS, [&](auto lines) {
    MBC_LAUNCH_SHARED((plane_sweep_conv_filter<T, lines, Prologue>), static_cast<unsigned>(a.parts * f.blocks), PIPELINE_THREADS,
                      FILTER_STAGES * f.stage_bytes, call.stream, x, dy, partial, f, prologue);
  });
  add_parts(call.stream, partial, dw, a.filters * SWEEP_TAPS * f.taps * a.channels, a.parts, a.accumulate != 0);
  return launched();
}

}  // namespace mbc
