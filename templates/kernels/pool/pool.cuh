// Pooling windows over an image, and strips, which are the parts of an image that threads walk over.
#pragma once

#include <cstring>
#include <type_traits>

#include "images.cuh"
#include "pooling_arguments.h"

namespace mbc {

// Division by a number that is unknown at compile time, by a multiplication ("Division by Invariant Integers using
// Multiplication", Granlund and Montgomery, 1994): exact if the product of the number and the largest dividend, `most`,
// is below 2^32, as it is for most coordinates and strides.
struct Divider {
  int32_t by;
  uint32_t reciprocal = 0;  // 2^32 over the divisor, rounded up; 0 for 1, and where the product is larger

  Divider(int64_t number, int64_t most) : by(static_cast<int32_t>(number)) {
    if (number > 1 && number * most >> 32 == 0)
      reciprocal = static_cast<uint32_t>(((int64_t{1} << 32) + number - 1) / number);
  }
  __device__ int32_t divide(int32_t a) const {
    if (reciprocal == 0) return by == 1 ? a : a / by;
    return static_cast<int32_t>(static_cast<uint64_t>(a) * reciprocal >> 32);
  }
};

// Windows along one axis.
struct PoolAxis {
  int32_t size, output, kernel, stride, before, after, dilation;
  int32_t span;  // pixels from the first position of a window to its last one
  Divider by_stride, by_dilation;

  PoolAxis(int64_t size_, int64_t output_, int64_t kernel_, int64_t stride_, int64_t before_, int64_t after_, int64_t dilation_)
      : size(narrow(size_)), output(narrow(output_)), kernel(narrow(kernel_)), stride(narrow(stride_)),
        before(narrow(before_)), after(narrow(after_)), dilation(narrow(dilation_)), span((kernel - 1) * dilation + 1),
        by_stride(stride, size_ + before), by_dilation(dilation, int64_t{span} + dilation) {}

  __device__ int32_t start(int32_t o) const { return o * stride - before; }
  // Pixels [low, high) between the ends of window o, without padding.
  __device__ int32_t low(int32_t o) const { return max(0, start(o)); }
  __device__ int32_t high(int32_t o) const { return min(size, start(o) + span); }
  // Positions [begin, end) of window o that are no padding.
  __device__ int32_t begin(int32_t o) const { return by_dilation.divide(low(o) - start(o) + dilation - 1); }
  __device__ int32_t end(int32_t o) const { return by_dilation.divide(high(o) - start(o) - 1) + 1; }
  // Windows [first, last) between whose ends a pixel is.
  __device__ int32_t first(int32_t pixel) const {
    const int32_t reach = pixel + before - span;
    return reach < 0 ? 0 : by_stride.divide(reach) + 1;
  }
  __device__ int32_t last(int32_t pixel) const { return min(output, by_stride.divide(pixel + before) + 1); }
  // Position of window o that is a pixel, or -1 if the pixel is between two positions.
  __device__ int32_t position(int32_t pixel, int32_t o) const {
    const int32_t offset = pixel - start(o), k = by_dilation.divide(offset);
    return k * dilation == offset ? k : -1;
  }
  // What window o counts for in the divisor of an average. With `count_pad` padding counts, but positions beyond the
  // padding do not.
  __device__ int32_t length(int32_t o, bool count_pad) const {
    return count_pad ? min(size + after, start(o) + span) - start(o) : high(o) - low(o);
  }
};

// A volume is an image whose planes lie one below the other. ANY: windows along one to three axes, of any dilation;
// otherwise along two, without dilation.
struct Window {
  Image input, output;
  PoolAxis planes, rows, columns;

  explicit Window(const PoolArguments& a)
      : input(a.layout, a.channels, a.depth * a.height, a.width),
        output(a.layout, a.channels, a.out_depth * a.out_height, a.out_width),
        planes(a.depth, a.out_depth, a.kernel_depth, a.stride_depth, a.pad_front, a.pad_back, a.dilation_depth),
        rows(a.height, a.out_height, a.kernel_height, a.stride_height, a.pad_top, a.pad_bottom, a.dilation_height),
        columns(a.width, a.out_width, a.kernel_width, a.stride_width, a.pad_left, a.pad_right, a.dilation_width) {}

  // Calls `each` for the pixels of the window of an output pixel, in order: number of the position, element of the input.
  template <bool ANY, typename Each>
  __device__ void each_pixel(const Pixel& p, Each each) const {
    if constexpr (ANY) {
      const int32_t z = p.y / rows.output, y = p.y - z * rows.output;
      for (int32_t q = planes.begin(z); q < planes.end(z); ++q)
        for (int32_t r = rows.begin(y); r < rows.end(y); ++r)
          for (int32_t s = columns.begin(p.x); s < columns.end(p.x); ++s) {
            const int32_t line = (planes.start(z) + q * planes.dilation) * rows.size + rows.start(y) + r * rows.dilation;
            each((q * rows.kernel + r) * columns.kernel + s,
                 input.at(p.n, p.c, line, columns.start(p.x) + s * columns.dilation));
          }
    } else {
      for (int32_t r = rows.low(p.y); r < rows.high(p.y); ++r)
        for (int32_t s = columns.low(p.x); s < columns.high(p.x); ++s) each(0, input.at(p.n, p.c, r, s));
    }
  }
  // Calls `each` for the windows that contain an input pixel, in order: number of the position, line and column of the
  // output.
  template <bool ANY, typename Each>
  __device__ void each_window(const Pixel& p, Each each) const {
    if constexpr (ANY) {
      const int32_t z = p.y / rows.size, y = p.y - z * rows.size;
      for (int32_t a = planes.first(z); a < planes.last(z); ++a)
        for (int32_t b = rows.first(y); b < rows.last(y); ++b)
          for (int32_t c = columns.first(p.x); c < columns.last(p.x); ++c) {
            const int32_t q = planes.position(z, a), r = rows.position(y, b), s = columns.position(p.x, c);
            if (q >= 0 && r >= 0 && s >= 0) each((q * rows.kernel + r) * columns.kernel + s, a * rows.output + b, c);
          }
    } else {
      for (int32_t r = rows.first(p.y); r < rows.last(p.y); ++r)
        for (int32_t s = columns.first(p.x); s < columns.last(p.x); ++s) each(0, r, s);
    }
  }
  // The divisor of an average.
  template <bool ANY>
  __device__ float size(int32_t y, int32_t x, bool count_pad) const {
    const int32_t z = ANY ? y / rows.output : 0;
    const int32_t plane = rows.length(y - z * rows.output, count_pad) * columns.length(x, count_pad);
    return static_cast<float>(ANY ? planes.length(z, count_pad) * plane : plane);
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
    if (a.any) return false;
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
