// Moves elements of tensors of any rank: permutations of axes and of their factors, slices, padding by a number, by the
// outermost elements, mirrored or cyclic, and its gradient, splitting. Every thread writes what it gathers, so that no two
// threads write one element and the order of additions is fixed.
//
// Bytes      the elements that are read once, the result once. If neither innermost axis is kept (a transposition),
//            elements are read far apart, and several warps read one line of the cache.
// Threads    256 in a grid-stride loop over the result, 16 bytes at a time if the innermost axis is contiguous in the
//            input; one division for each axis finds an element, mostly by a reciprocal.
// Limit      memory bandwidth; with many axes and no vectors index arithmetic.
#include "strided.cuh"
#include "gather_arguments.h"
#include "gather_operands.h"

namespace mbc {

enum Outside : int64_t { ZERO = 0, REPLICATE = 1, REFLECT = 2, WRAP = 3 };

template <typename T, int N>
__global__ void copy_places(const T* x, T* y, int64_t vectors, Strided<1> places) {
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    int64_t at[1];
    places.locate(i * N, at);
    store(y + i * N, load<N>(x + at[0]));
  }
}

template <typename T>
void run_copy(cudaStream_t stream, const T* x, T* y, int64_t elements, const Strided<1>& places) {
  const bool adjacent = places.axes > 0 && places.stride[0][places.axes - 1] == 1;
  by_vectors<WIDTH<T>>(adjacent && places.vectorizable(WIDTH<T>) && aligned(x, 16) && aligned(y, 16), [&](auto n) {
    MBC_LAUNCH((copy_places<T, n>), blocks_for(elements / n), THREADS, stream, x, y, elements / n, places);
  });
}

// True if vectors of a contiguous innermost axis begin at multiples of their size.
template <typename T, typename Axes>
bool reads_vectors(const MbcCall& call, const Axes& along) {
  bool whole = along.axes > 0 && along.extent[along.axes - 1] % WIDTH<T> == 0;
  for (int axis = 0; axis < along.axes - 1; ++axis) whole = whole && along.stride[axis] % WIDTH<T> == 0;
  return whole && arguments<GatherArguments>(call).plain != 0 && unaligned(call) == nullptr;
}

// Positions of the result's elements in the input: along each axis (start + step * o) / spread.
struct Window {
  int axes;
  int64_t mode;
  int64_t extent[MOST_AXES], stride[MOST_AXES], size[MOST_AXES], start[MOST_AXES], step[MOST_AXES], spread[MOST_AXES];
  Reciprocal by_extent[MOST_AXES], by_spread[MOST_AXES];

  Window(const int64_t* integers, int64_t outside) : axes(static_cast<int>(*integers++)), mode(outside) {
    for (int64_t* column : {extent, stride, size, start, step, spread})
      for (int axis = 0; axis < axes; ++axis) column[axis] = *integers++;
    for (int axis = 0; axis < axes; ++axis) {
      by_extent[axis] = Reciprocal(extent[axis]);
      by_spread[axis] = Reciprocal(spread[axis]);
    }
  }
  // The position of element i, or less than 0 for the number outside.
  __device__ int64_t locate(int64_t i) const {
    int64_t at = 0;
    bool inside = true;
#pragma unroll 1
    for (int axis = axes - 1; axis >= 0; --axis) {
      const int64_t outer = axis == 0 ? 0 : by_extent[axis](i), n = size[axis];
      int64_t index = start[axis] + step[axis] * (i - outer * extent[axis]);
      if (mode == ZERO) {
        // Spread elements are at multiples: a negative index is no position, whatever it is a multiple of.
        inside &= index >= 0;
        const int64_t whole = index < 0 ? index : by_spread[axis](index);
        inside &= whole * spread[axis] == index || spread[axis] == 1;
        inside &= whole < n;
        index = whole;
      } else if (mode == REPLICATE) {
        index = min(max(index, int64_t{0}), n - 1);
      } else if (mode == WRAP) {
        index = index < 0 ? index + n : index >= n ? index - n : index;
      } else {
        index = index < 0 ? -index : index >= n ? 2 * (n - 1) - index : index;
      }
      at += index * stride[axis];
      i = outer;
    }
    return inside ? at : -1;
  }
};

template <typename T, int N>
__global__ void gather_window(const T* x, T* y, int64_t vectors, Window window, float outside) {
  for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
    const int64_t at = window.locate(i * N);
    Vec<T, N> v;
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(outside);
    if (at >= 0) v = load<N>(x + at);
    store(y + i * N, v);
  }
}

// The elements of the padded tensor that read one element: a few along each axis, in all combinations.
struct Readers {
  int axes;
  int64_t mode;
  int64_t extent[MOST_AXES], stride[MOST_AXES], before[MOST_AXES], after[MOST_AXES];

  Readers(const int64_t* integers, int64_t outside) : axes(static_cast<int>(*integers++)), mode(outside) {
    for (int64_t* column : {extent, stride, before, after})
      for (int axis = 0; axis < axes; ++axis) column[axis] = *integers++;
  }
  __device__ bool reflects_before(int axis, int64_t i) const { return i >= 1 && i <= before[axis]; }
  __device__ bool reflects_after(int axis, int64_t i) const {
    return i <= extent[axis] - 2 && i >= extent[axis] - 1 - after[axis];
  }
  __device__ int64_t count(int axis, int64_t i) const {
    if (mode == REFLECT) return 1 + reflects_before(axis, i) + reflects_after(axis, i);
    if (mode == WRAP) return 1 + (before[axis] + i >= extent[axis]) + (i < after[axis]);
    return 1 + (i == 0 ? before[axis] : 0) + (i == extent[axis] - 1 ? after[axis] : 0);
  }
  // The k-th of these elements.
  __device__ int64_t reader(int axis, int64_t i, int64_t k) const {
    if (mode == WRAP) return before[axis] + i + (k - (before[axis] + i >= extent[axis])) * extent[axis];
    if (mode == REPLICATE) return (i == 0 ? 0 : before[axis] + i) + k;
    if (k == 0) return before[axis] + i;
    if (k == 1 && reflects_before(axis, i)) return before[axis] - i;
    return before[axis] + 2 * (extent[axis] - 1) - i;
  }
};

template <typename T, int N>
__global__ void gather_readers(const T* dy, T* dx, int64_t vectors, Readers readers) {
  for (int64_t v = thread_index(); v < vectors; v += thread_count()) {
    int64_t index[MOST_AXES], i = v * N, combinations = 1;
    for (int axis = readers.axes - 1; axis >= 0; --axis) {
      const int64_t outer = axis == 0 ? 0 : quotient(i, readers.extent[axis]);
      index[axis] = i - outer * readers.extent[axis];
      combinations *= readers.count(axis, index[axis]);
      i = outer;
    }
    float sum[N] = {};
    for (int64_t c = 0; c < combinations; ++c) {
      int64_t at = 0, rest = c;
      for (int axis = readers.axes - 1; axis >= 0; --axis) {
        const int64_t count = readers.count(axis, index[axis]), more = count == 1 ? rest : quotient(rest, count);
        at += readers.reader(axis, index[axis], rest - more * count) * readers.stride[axis];
        rest = more;
      }
      const Vec<T, N> u = load<N>(dy + at);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += to_float(u.v[j]);
    }
    Vec<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = from_float<T>(sum[j]);
    store(dx + v * N, result);
  }
}

}  // namespace mbc

extern "C" const char* mbc_rearrange(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<RearrangeArguments>(call);
  const int64_t* more = behind<RearrangeArguments>(call);
  const Strided<1> places(more);
  MBC_FOR_TYPE(a.type, T, { run_copy(call.stream, in<T>(call, 0), out<T>(call, 1), a.elements, places); });
  return launched();
}

// `pad` uses this launcher, too: positions outside are padding.
extern "C" const char* mbc_strided_slice(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GatherArguments>(call);
  const Window window(behind<GatherArguments>(call), a.mode);
  const float outside = real(call, 0);
  MBC_FOR_TYPE(a.type, T, {
    by_vectors<WIDTH<T>>(reads_vectors<T>(call, window), [&](auto n) {
      MBC_LAUNCH((gather_window<T, n>), blocks_for(a.elements / n), THREADS, call.stream, in<T>(call, 0),
                 out<T>(call, 1), a.elements / n, window, outside);
    });
  });
  return launched();
}

extern "C" const char* mbc_pad_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GatherArguments>(call);
  const Readers readers(behind<GatherArguments>(call), a.mode);
  MBC_FOR_TYPE(a.type, T, {
    by_vectors<WIDTH<T>>(reads_vectors<T>(call, readers), [&](auto n) {
      MBC_LAUNCH((gather_readers<T, n>), blocks_for(a.elements / n), THREADS, call.stream, in<T>(call, 0),
                 out<T>(call, 1), a.elements / n, readers);
    });
  });
  return launched();
}

extern "C" const char* mbc_split(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SplitArguments>(call);
  const int64_t* more = behind<SplitArguments>(call);
  const auto at = operands_of_split(call);
  MBC_FOR_TYPE(a.type, T, {
    for (int64_t part = 0; part < a.parts; ++part) {
      const int64_t elements = *more++, first = *more++;
      const Strided<1> places(more);
      run_copy(call.stream, at.x.as<const T>() + first, at.parts[part].as<T>(), elements, places);
    }
  });
  return launched();
}
