// Stem convolutions of volumes: images of one to four channels, filters of 3 x 3 x 3, a stride of one, in bf16 and fp16,
// channels last (decision 098). This file has tiles, and the planes of the image in shared memory.
//
// A block takes a tile of 16 lines x 32 columns of the output and sweeps it along a segment of planes. Four planes of the
// image with their halo are in shared memory: three under the filter, and the next one, which arrives meanwhile. In
// shared memory an element is the lower half of a word, whose upper half is a later element of the same line. So a word
// is two neighbours of a fragment, wherever the first of them lies.
#pragma once

#include "mma.cuh"
#include "stem_volume_arguments.h"
#include "sweep_tiles.cuh"

namespace mbc {

// Warps and columns as in mbc/kernels/cuda/conv/stem_volume.py.
constexpr int STEM_WARPS = 8, STEM_THREADS = 32 * STEM_WARPS, STEM_SLOTS = 4, STEM_COLUMNS = 32;
constexpr int STEM_LINES = SWEEP_LINES / STEM_WARPS, STEM_PIECES = STEM_COLUMNS / 16;  // of a warp; of 16 columns of a line

struct StemVolume : PlaneSweep {
  SweptTensor image;

  explicit StemVolume(const StemVolumeArguments& a) : PlaneSweep(a, a.segment_planes), image(a, *this) {
    tile_columns = STEM_COLUMNS;
    across = narrow(divide_up(out_columns, STEM_COLUMNS));
    tiles = a.rows * across * down * segments;
  }
  // Elements of an output line, and of an output plane.
  __device__ int32_t line_elements() const { return out_columns * filters; }
  __device__ int32_t plane_elements() const { return out_lines * line_elements(); }
};

// Planes of the image under a tile, in a ring of STEM_SLOTS slots. DISTANCE: elements between the halves of a word.
template <typename T, int CHANNELS, int DISTANCE>
class StemPlanes {
 public:
  static constexpr int RUN = SWEEP_TAPS * CHANNELS;  // elements of a line under a filter
  static constexpr int LINES = SWEEP_LINES + SWEEP_TAPS - 1, ROW = (STEM_COLUMNS + SWEEP_TAPS - 1) * CHANNELS;
  // Words of a line, ten banks after the line before: lines under a filter then lie in different banks.
  static constexpr int PITCH = ROW + (42 - ROW % 32) % 32;
  static constexpr int PLANE = LINES * PITCH, WORDS = STEM_SLOTS * PLANE;

  __device__ StemPlanes(const T* x, uint32_t* words, const StemVolume& f, const SweepTile& tile)
      : slots(words), first_plane(tile.begin - f.pad_planes), first_line(tile.line - f.image.pad_lines),
        first_element((tile.column - f.image.pad_columns) * CHANNELS), planes(f.planes), lines(f.image.lines),
        elements(f.image.columns * CHANNELS), sample(x + tile.row * planes * lines * elements) {}
  // Reads a part of a plane to registers: zeros outside of the image. Planes are counted from the tile's first, and have
  // STEM_LINES parts.
  __device__ void fetch(int32_t number, int32_t part) {
    const int32_t z = first_plane + number;
    each(part, [&](int i, int32_t line, int32_t element) {
      const int32_t y = first_line + line, x = first_element + element;
      const bool inside = z >= 0 && z < planes && y >= 0 && y < lines && x >= 0 && x < elements;
      held[i] = inside ? sample[(z * lines + y) * elements + x] : from_float<T>(0.0f);
    });
  }
  // Writes the part that was read last to the plane's slot.
  __device__ void keep(int32_t number, int32_t part) {
    each(part, [&](int i, int32_t line, int32_t element) {
      T* const halves = reinterpret_cast<T*>(slots + number % STEM_SLOTS * PLANE + line * PITCH + element);
      halves[0] = held[i];
      if (element >= DISTANCE) halves[1 - 2 * DISTANCE] = held[i];
    });
  }
  // The planes under the first output plane.
  __device__ void begin() {
#pragma unroll 1
    for (int32_t i = 0; i < SWEEP_TAPS * STEM_LINES; ++i) {
      fetch(i / STEM_LINES, i % STEM_LINES);
      keep(i / STEM_LINES, i % STEM_LINES);
    }
  }

 private:
  static constexpr int PARTS = STEM_LINES * STEM_THREADS, HELD = (LINES * ROW + PARTS - 1) / PARTS;

  template <typename Run>
  __device__ void each(int32_t part, const Run& run) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int32_t index = static_cast<int32_t>(threadIdx.x) + (part * HELD + i) * STEM_THREADS, line = index / ROW;
      if (line < LINES) run(i, line, index - line * ROW);
    }
  }

  uint32_t* const slots;
  const int32_t first_plane, first_line, first_element, planes, lines, elements;
  const T* const sample;
  T held[HELD];
};

// The words under a filter, from a voxel's first on: their indices in a ring, for each slot of the voxel's first plane.
// They are in shared memory, since registers for all of them would be too many.
template <typename Planes, int COUNT>
struct StemWords {
  int32_t under[STEM_SLOTS][COUNT];

  // The first element of word i is element i % run of line i / run under the filter, of `step` elements a word.
  __device__ void fill(int32_t run, int32_t step) {
    for (int32_t i = threadIdx.x; i < STEM_SLOTS * COUNT; i += STEM_THREADS) {
      const int32_t element = i % COUNT * step, line = min(element / run, SWEEP_TAPS * SWEEP_TAPS - 1);
      const int32_t slot = (i / COUNT + line / SWEEP_TAPS) % STEM_SLOTS;
      under[i / COUNT][i % COUNT] = slot * Planes::PLANE + line % SWEEP_TAPS * Planes::PITCH + element % run;
    }
  }
  // Those for an output plane, counted from the tile's first.
  __device__ const int32_t* of(int32_t plane) const { return under[plane % STEM_SLOTS]; }
};

// Calls `run` with the number of channels as a constant.
template <typename Run>
const char* with_stem_channels(int64_t channels, const Run& run) {
  return channels == 1   ? run(std::integral_constant<int, 1>())
         : channels == 2 ? run(std::integral_constant<int, 2>())
         : channels == 3 ? run(std::integral_constant<int, 3>())
         : channels == 4 ? run(std::integral_constant<int, 4>())
                         : "there are neither one nor two nor three nor four channels";
}

}  // namespace mbc
