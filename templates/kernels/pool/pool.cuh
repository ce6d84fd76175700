// Pooling windows over an image, and strips, which are the parts of an image that threads walk over.
#pragma once

#include <cstring>
#include <type_traits>

#include "images.cuh"
#include "pooling_arguments.h"

namespace mbc {

// Division by a number that is unknown at compile time, by a multiplication ("Division by Invariant Integers using
// Multiplication", Granlund and Montgomery, 1994): exact if the product of the two is below 2^32, as it is for a
// coordinate and a stride.
struct Divider {
  uint32_t reciprocal;  // 2^32 over the divisor, rounded up; 0 for 1

  explicit Divider(int64_t by) : reciprocal(by == 1 ? 0 : static_cast<uint32_t>(((int64_t{1} << 32) + by - 1) / by)) {}
  __device__ int32_t divide(int32_t a) const {
    return reciprocal == 0 ? a : static_cast<int32_t>(static_cast<uint64_t>(a) * reciprocal >> 32);
  }
};

struct Window {
  Image input, output;
  Divider by_stride_height, by_stride_width;
  int32_t kernel_height, kernel_width, stride_height, stride_width, pad_top, pad_bottom, pad_left, pad_right;

  explicit Window(const PoolArguments& a)
      : input(a.layout, a.channels, a.height, a.width),
        output(a.layout, a.channels, a.out_height, a.out_width),
        by_stride_height(a.stride_height),
        by_stride_width(a.stride_width),
        kernel_height(static_cast<int32_t>(a.kernel_height)),
        kernel_width(static_cast<int32_t>(a.kernel_width)),
        stride_height(static_cast<int32_t>(a.stride_height)),
        stride_width(static_cast<int32_t>(a.stride_width)),
        pad_top(static_cast<int32_t>(a.pad_top)),
        pad_bottom(static_cast<int32_t>(a.pad_bottom)),
        pad_left(static_cast<int32_t>(a.pad_left)),
        pad_right(static_cast<int32_t>(a.pad_right)) {}

  // Input rows [top, bottom) of output row y, without padding; columns have the same function.
  __device__ int32_t top(int32_t y) const { return max(0, y * stride_height - pad_top); }
  __device__ int32_t bottom(int32_t y) const {
    return min(static_cast<int32_t>(input.height), y * stride_height - pad_top + kernel_height);
  }
  __device__ int32_t left(int32_t x) const { return max(0, x * stride_width - pad_left); }
  __device__ int32_t right(int32_t x) const {
    return min(static_cast<int32_t>(input.width), x * stride_width - pad_left + kernel_width);
  }
  // Output rows [first_row, last_row) whose windows contain input row y; columns have the same function.
  __device__ int32_t first_row(int32_t y) const {
    const int32_t reach = y + pad_top - kernel_height;
    return reach < 0 ? 0 : by_stride_height.divide(reach) + 1;
  }
  __device__ int32_t last_row(int32_t y) const {
    return min(static_cast<int32_t>(output.height), by_stride_height.divide(y + pad_top) + 1);
  }
  __device__ int32_t first_column(int32_t x) const {
    const int32_t reach = x + pad_left - kernel_width;
    return reach < 0 ? 0 : by_stride_width.divide(reach) + 1;
  }
  __device__ int32_t last_column(int32_t x) const {
    return min(static_cast<int32_t>(output.width), by_stride_width.divide(x + pad_left) + 1);
  }
  // The divisor of an average. With `count_pad` padding counts, but positions beyond the padding do not.
  __device__ float size(int32_t y, int32_t x, bool count_pad) const {
    if (!count_pad) return static_cast<float>((bottom(y) - top(y)) * (right(x) - left(x)));
    const int32_t above = y * stride_height - pad_top, before = x * stride_width - pad_left;
    const int32_t down = min(static_cast<int32_t>(input.height) + pad_bottom, above + kernel_height) - above;
    const int32_t across = min(static_cast<int32_t>(input.width) + pad_right, before + kernel_width) - before;
    return static_cast<float>(down * across);
  }
};

// N elements in registers, in their stored form.
template <typename T, int N>
struct Packed : Held<T, N> {
  using Word = typename Held<T, N>::Word;
  using Held<T, N>::words, Held<T, N>::IN_WORD, Held<T, N>::WORDS;

  __device__ static Packed at(const T* from) { return *reinterpret_cast<const Packed*>(from); }
  __device__ static Packed of(const float (&values)[N]) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      T elements[IN_WORD];
#pragma unroll
      for (int k = 0; k < IN_WORD; ++k) elements[k] = from_float<T>(values[i * IN_WORD + k]);
      memcpy(&packed.words[i], elements, sizeof(Word));
    }
    return packed;
  }
  __device__ float value(int j) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && IN_WORD == 2) {  // fp32 without its lower half
      const uint32_t bits = j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16;
      float value;
      memcpy(&value, &bits, sizeof(value));
      return value;
    } else {
      return to_float((*this)[j]);
    }
  }
  // st.global.v4: the compiler would store four bytes at a time.
  __device__ void write(T* to) const {
#ifndef MBC_EMULATED
    if constexpr (sizeof(words) == 16) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
      return;
    }
#endif
    *reinterpret_cast<Packed*>(to) = *this;
  }
};

// A window whose size and stride are known at compile time.
template <int KH, int KW, int SH, int SW>
struct Fixed {
  static constexpr int KERNEL_HEIGHT = KH, KERNEL_WIDTH = KW, STRIDE_HEIGHT = SH, STRIDE_WIDTH = SW;
  static constexpr int CARRIED = KH - SH;                // rows of pixels that a window shares with the one below
  static constexpr int ABOVE = (KH + SH - 1) / SH - 1;   // earlier windows that share rows with a window
  static constexpr int LOWEST = ABOVE == 0 ? 2 : 1 + 3 * ABOVE;  // least rows of a strip that justify reading the shared rows above
  static constexpr int WINDOWS_ACROSS = (KW + SW - 1) / SW;      // neighbouring windows that contain one column
  static_assert(KH >= SH && KW >= SW, "a window as large as its stride");
  static bool is(const PoolArguments& a) {
    return a.kernel_height == KH && a.kernel_width == KW && a.stride_height == SH && a.stride_width == SW;
  }
};

// Only the plan's working type has kernels for usual windows, because compiling them takes long.
#ifdef MBC_EMULATED
template <typename T>
constexpr bool USUAL = true;
#else
template <typename T>
constexpr bool USUAL = std::is_same_v<T, MbcWorking>;
#endif

// Calls `run(Fixed<...>{})` for windows of a usual size and types T that have such kernels; returns whether it did.
template <typename T, typename Run>
bool for_usual_window(const PoolArguments& a, Run run) {
  if constexpr (USUAL<T>) {
    if (Fixed<2, 2, 2, 2>::is(a)) return run(Fixed<2, 2, 2, 2>{}), true;
    if (Fixed<3, 3, 2, 2>::is(a)) return run(Fixed<3, 3, 2, 2>{}), true;
    if (Fixed<3, 3, 1, 1>::is(a)) return run(Fixed<3, 3, 1, 1>{}), true;
  }
  return false;
}

constexpr int64_t MANY_THREADS = int64_t{1} << 19;  // several times the threads that a large GPU holds

// Channels last: a thread keeps its channels and one column, and walks down a strip of `height` of the `rows` rows, so
// that rows that windows share are read once.
struct Strips {
  unsigned threads_x, threads_y, tiles;  // threads along the channels, threads along columns and strips, blocks along channels
  uint32_t width, height, rows, per_image;
  int64_t count;

  // `lowest`: the least height of a strip; columns are divided until there are at least `least` strips.
  Strips(int64_t vectors, int64_t images, int64_t columns, int64_t row_count, int64_t lowest, int64_t least) {
    tiles = static_cast<unsigned>(divide_up(vectors, 32));
    threads_x = static_cast<unsigned>(divide_up(vectors, tiles));
    threads_y = THREADS / threads_x;
    width = static_cast<uint32_t>(columns);
    rows = static_cast<uint32_t>(row_count);
    int64_t each = divide_up(row_count, 16);  // strips of an image's column
    while (images * columns * each < least && row_count > 2 * lowest * each) each *= 2;
    height = static_cast<uint32_t>(divide_up(row_count, each));
    per_image = static_cast<uint32_t>(divide_up(row_count, height));
    count = images * columns * per_image;
  }
};

struct Strip {
  int64_t n;
  int32_t column, first, last;  // rows [first, last)

  __device__ Strip(const Strips& strips, int64_t item) {
    const int64_t line = quotient(item, strips.width);
    n = quotient(line, strips.per_image);
    column = static_cast<int32_t>(item - line * strips.width);
    first = static_cast<int32_t>(line - n * strips.per_image) * static_cast<int32_t>(strips.height);
    last = min(first + static_cast<int32_t>(strips.height), static_cast<int32_t>(strips.rows));
  }
};

}  // namespace mbc
