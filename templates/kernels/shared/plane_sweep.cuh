// Convolutions with 3 x 3 x 3 filters, or 3 x 3 for images, that sweep a tile of the image along its planes: one plane
// after another is copied to shared memory, with a halo of lines and columns, and is read by all filter taps from there.
#pragma once

#include "device.cuh"
#include "pipeline.cuh"
#include "plane_sweep_arguments.h"

// The planes of a volume are those of its depth. An image is a volume whose planes are its lines, of one line each.
//
//   a tile of a volume: 16 lines x 8 columns      of an image: 1 line x 128 columns
//
// A tile takes a segment of the output's planes. In shared memory a plane is [line][8 channels][column]: an operand of
// wgmma in core matrices (16 bytes of 8 columns), whose next filter tap is the same memory with an offset.

namespace mbc {

constexpr int SWEEP_TAPS = 3;  // planes, lines and columns under a filter
constexpr int SWEEP_STAGES = 4, SWEEP_VOXELS = 128, SWEEP_LINES = 16;  // as in mbc/kernels/cuda/conv/plane_sweep.py
constexpr int SWEEP_WARPS = CONSUMERS * WARPGROUP / 32;  // of the consumers
constexpr int MOST_BOX_VOXELS = (SWEEP_LINES + 2) * (SWEEP_VOXELS / SWEEP_LINES + 2);  // with the halo of 3 x 3 taps

// Calls `run` with the one of these numbers that is equal to `number`; returns whether there is one.
template <int... NUMBERS, typename Run>
bool run_with_one_of(int64_t number, const Run& run) {
  return ((number == NUMBERS && (run(std::integral_constant<int, NUMBERS>{}), true)) || ...);
}

// Whether setmaxnreg ends: threads start with 168 registers, and two warpgroups of consumers wait for ever for more than
// the producer returns.
constexpr bool passes_registers(int producer, int consumer) { return CONSUMERS * (consumer - 168) <= 168 - producer; }

struct SweepTile {
  int64_t row;
  int32_t line, column, begin, end;  // the first output line and column; output planes
};

struct PlaneSweep {
  int32_t planes, out_planes, out_lines, out_columns, channels, filters, pad_planes;
  int32_t tap_lines, taps;                         // lines under a filter; taps of a plane
  int32_t tile_lines, tile_columns, across, down;  // of a tile; tiles along a line and along the columns
  int32_t segments, segment_planes;
  int64_t tiles;

  PlaneSweep(const PlaneSweepArguments& a, int64_t planes_of_segment)
      : planes(narrow(a.planes)), out_planes(narrow(a.out_planes)), out_lines(narrow(a.out_lines)),
        out_columns(narrow(a.out_columns)), channels(narrow(a.channels)), filters(narrow(a.filters)),
        pad_planes(narrow(a.pad_planes)), tap_lines(a.flat ? 1 : SWEEP_TAPS), taps(tap_lines * SWEEP_TAPS), tile_lines(a.flat ? 1 : SWEEP_LINES), tile_columns(SWEEP_VOXELS / tile_lines),
        across(narrow(divide_up(out_columns, tile_columns))), down(narrow(divide_up(out_lines, tile_lines))),
        segments(narrow(divide_up(out_planes, planes_of_segment))), segment_planes(narrow(planes_of_segment)),
        tiles(a.rows * across * down * segments) {}
  __device__ SweepTile tile(int64_t number) const {
    const auto index = static_cast<int32_t>(number);
    const int32_t line = index / across, plane = line / down, row = plane / segments;
    const int32_t begin = (plane - row * segments) * segment_planes;
    return {row, (line - plane * down) * tile_lines, (index - line * across) * tile_columns, begin,
            min(begin + segment_planes, out_planes)};
  }
  // Planes of the input under a tile that exist: counted from the padding, so that output plane z reads z to z + 2.
  __device__ int32_t first(const SweepTile& tile) const { return max(tile.begin, pad_planes); }
  __device__ int32_t last(const SweepTile& tile) const { return min(tile.end + SWEEP_TAPS - 1, planes + pad_planes); }
};

// A tensor [rows, planes, lines, columns, channels] and the box of one of its planes under a tile, of some channels.
struct SweptTensor {
  int32_t planes, lines, columns, channels, pad_lines, pad_columns, box_lines, box_columns;

  // The image, with its halo.
  SweptTensor(const PlaneSweepArguments& a, const PlaneSweep& f)
      : planes(f.planes), lines(narrow(a.lines)), columns(narrow(a.columns)), channels(f.channels),
        pad_lines(narrow(a.pad_lines)), pad_columns(narrow(a.pad_columns)), box_lines(f.tile_lines + f.tap_lines - 1),
        box_columns(f.tile_columns + SWEEP_TAPS - 1) {}
  // The result.
  explicit SweptTensor(const PlaneSweep& f)
      : planes(f.out_planes), lines(f.out_lines), columns(f.out_columns), channels(f.filters), pad_lines(0), pad_columns(0),
        box_lines(f.tile_lines), box_columns(f.tile_columns) {}
  __host__ __device__ int32_t chunk_pitch() const { return box_columns * 16; }  // bytes between chunks of 8 channels
  __host__ __device__ int32_t line_pitch(int32_t eights) const { return eights * chunk_pitch(); }
  __host__ __device__ int32_t box_bytes(int32_t eights) const { return box_lines * line_pitch(eights); }
  // Bytes between groups of eight neighbouring voxels of a tile, of which the tile has 16.
  __device__ int32_t group_pitch(int32_t eights) const { return box_columns >= SWEEP_VOXELS ? 8 * 16 : line_pitch(eights); }
};

// The part of one thread of a warpgroup in copies of a box of 8 EIGHTS channels, for all planes of a tile.
template <typename T, int EIGHTS>
class BoxCopy {
 public:
  __device__ BoxCopy(const T* tensor, const SweptTensor& t, const SweepTile& tile, int32_t first_channel)
      : row(tensor + tile.row * t.planes * t.lines * t.columns * t.channels + first_channel),
        plane(t.lines * t.columns * t.channels) {
    const int32_t thread = threadIdx.x % WARPGROUP, eight = thread % EIGHTS;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int32_t voxel = thread / EIGHTS + i * STRIDE, line = voxel / t.box_columns, column = voxel - line * t.box_columns;
      const int32_t y = tile.line - t.pad_lines + line, x = tile.column - t.pad_columns + column;
      const bool exists = y >= 0 && y < t.lines && x >= 0 && x < t.columns;
      from[i] = exists ? (y * t.columns + x) * t.channels + eight * 8 : -1;
      const bool copies = thread < STRIDE * EIGHTS && voxel < t.box_lines * t.box_columns;
      to[i] = copies ? (line * EIGHTS + eight) * t.chunk_pitch() + column * 16 : -1;
    }
  }
  // Starts the copies of a plane: zeros outside of the tensor, and for planes that do not exist.
  __device__ void start(int32_t number, bool exists, char* box) const {
    const T* const begin = row + static_cast<int64_t>(exists ? number : 0) * plane;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (to[i] >= 0)
        cp_async_16(reinterpret_cast<uint4*>(box + to[i]), begin + max(from[i], 0), exists && from[i] >= 0);
  }
  // Bit i says whether chunk i of the thread is in the tensor, rather than zeros around it.
  __device__ uint32_t chunks_inside() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) bits |= static_cast<uint32_t>(to[i] >= 0 && from[i] >= 0) << i;
    return bits;
  }
  __device__ int32_t place(int chunk) const { return to[chunk]; }  // bytes in the box

  static constexpr int STRIDE = WARPGROUP / EIGHTS, COUNT = (MOST_BOX_VOXELS + STRIDE - 1) / STRIDE;

 private:
  const T* row;
  int32_t plane;                    // elements
  int32_t from[COUNT], to[COUNT];  // elements in the plane, and bytes in the box; -1: none
};

// What a producer does to the planes that it copies: nothing. `Thread` is what a thread keeps of the planes that it has
// begun to copy, of 8 EIGHTS channels from `first_channel` on, and it tells consumers which planes are complete.
struct AsStored {
  template <typename T, int EIGHTS, int STAGES>
  struct Thread {
    Pipeline<STAGES>& pipeline;
    __device__ Thread(const AsStored&, Pipeline<STAGES>& pipeline_, char*, int32_t, int32_t) : pipeline(pipeline_) {}
    __device__ void begin(const SweepTile&, const BoxCopy<T, EIGHTS>&) {}
    // After the copies of a plane were started; `exists`: whether the plane is in the tensor.
    __device__ void started(int32_t iteration, const BoxCopy<T, EIGHTS>&, bool) {
      pipeline.full[iteration % STAGES].cp_async_arrive();
    }
    __device__ void finish() {}
  };
};

}  // namespace mbc
