// Tensors of any rank, described by extents and strides, which is common to broadcast, reduced, permuted and sliced
// operands. The planner merged axes that are contiguous in all operands (mbc/kernels/cuda/strided.py), so that most
// launches have one to three axes.
#pragma once

#include "images.cuh"

namespace mbc {

constexpr int MOST_AXES = 12;

// The outermost axis first. An operand that is repeated along an axis has the stride 0 there.
template <int OPERANDS>
struct Strided {
  int axes = 0;
  int64_t extent[MOST_AXES], stride[OPERANDS][MOST_AXES];
  Reciprocal by_extent[MOST_AXES];

  Strided() = default;
  // Read from the integers of a launch; advances them to the integers that follow.
  explicit Strided(const int64_t*& integers) : axes(static_cast<int>(*integers++)) {
    for (int axis = 0; axis < axes; ++axis) set_extent(axis, *integers++);
    for (int k = 0; k < OPERANDS; ++k)
      for (int axis = 0; axis < axes; ++axis) stride[k][axis] = *integers++;
  }

  void set_extent(int axis, int64_t elements) {
    extent[axis] = elements;
    by_extent[axis] = Reciprocal(elements);
  }
  int64_t elements() const {
    int64_t count = 1;
    for (int axis = 0; axis < axes; ++axis) count *= extent[axis];
    return count;
  }
  // True if n elements that are adjacent in the order of the axes can be read together: in every operand they are
  // adjacent or one repeated element, and the operand is aligned if needed.
  bool vectorizable(int n) const {
    if (axes == 0 || extent[axes - 1] % n != 0) return false;
    for (int k = 0; k < OPERANDS; ++k) {
      const int64_t last = stride[k][axes - 1];
      if (last != 0 && last != 1) return false;
      for (int axis = 0; last == 1 && axis < axes - 1; ++axis)
        if (stride[k][axis] % n != 0) return false;
    }
    return true;
  }

  // True if n elements can be read together even if they are of two lines of the innermost axis: every operand has the
  // order of the axes, or one element for each line.
  bool vectorizable_across_lines(int n) const {
    if (axes == 0 || extent[axes - 1] < n || elements() % n != 0) return false;
    for (int k = 0; k < OPERANDS; ++k) {
      bool ordered = true;
      int64_t inner = 1;
      for (int axis = axes - 1; axis >= 0; inner *= extent[axis--]) ordered = ordered && stride[k][axis] == inner;
      if (!ordered && stride[k][axes - 1] != 0) return false;
    }
    return true;
  }
  // True if elements that are adjacent in the order of the axes are adjacent in operand k.
  bool adjacent(int k) const { return axes > 0 && stride[k][axes - 1] == 1; }
  // Counts vectors of n elements along the innermost axis, whose extent is a multiple of n, instead of elements.
  void take_vectors(int n) {
    if (n == 1) return;
    set_extent(axes - 1, extent[axes - 1] / n);
    for (int k = 0; k < OPERANDS; ++k) stride[k][axes - 1] *= n;
  }

  // The offset of element i in every operand.
  __device__ void locate(int64_t i, int64_t (&at)[OPERANDS]) const {
#pragma unroll
    for (int k = 0; k < OPERANDS; ++k) at[k] = 0;
#pragma unroll 1
    for (int axis = axes - 1; axis >= 0; --axis) {
      const int64_t outer = axis == 0 ? 0 : by_extent[axis](i), index = i - outer * extent[axis];
#pragma unroll
      for (int k = 0; k < OPERANDS; ++k) at[k] += index * stride[k][axis];
      i = outer;
    }
  }
  // The number of elements from element i to the end of its line along the innermost axis.
  __device__ int64_t left_in_line(int64_t i) const {
    const int64_t line = extent[axes - 1];
    return line - (i - by_extent[axes - 1](i) * line);
  }
  __device__ bool repeats(int k) const { return axes == 0 || stride[k][axes - 1] == 0; }
};

// N elements from `at` on, or one element N times.
template <int N, typename T>
__device__ Vec<T, N> load_or_repeat(const T* at, bool repeat) {
  if constexpr (N > 1) {
    if (repeat) {
      Vec<T, N> v;
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] = *at;
      return v;
    }
  }
  return load<N>(at);
}

// N elements of operand k from element i on, at offset `at`. `across`: elements of the next line are repeated from
// there.
template <int N, typename T, int OPERANDS>
__device__ Vec<T, N> load_places(const T* x, const Strided<OPERANDS>& places, int k, int64_t i, int64_t at, bool across) {
  const bool repeat = places.repeats(k);
  Vec<T, N> v = load_or_repeat<N>(x + at, repeat);
  if constexpr (N > 1) {
    if (across && repeat) {
      const int64_t left = places.left_in_line(i);
      if (left < N) {
        int64_t next[OPERANDS];
        places.locate(i + left, next);
        const T value = x[next[k]];
#pragma unroll
        for (int j = 1; j < N; ++j) v.v[j] = j < left ? v.v[j] : value;
      }
    }
  }
  return v;
}

}  // namespace mbc
