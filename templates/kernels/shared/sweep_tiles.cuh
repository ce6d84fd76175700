// Tiles of convolutions with 3 x 3 x 3 filters, or 3 x 3 for images, that sweep planes, and the boxes of a plane under them.
#pragma once

#include "device.cuh"
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

}  // namespace mbc
