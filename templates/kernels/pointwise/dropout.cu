// Dropout, stochastic depth and their gradients, with random numbers from Philox 4x32-10 (philox.cuh).
//
// Element i of the whole mini-batch, counted channels first whatever the layout, takes word i % 4 of Philox block i /
// 4. Therefore a mask does not depend on how the mini-batch is divided or stored, and can be recomputed at any time.
//
// Bytes      the tensor in once and out once; no mask is stored.
// Threads    256 in a grid-stride loop. With channels first a thread computes the four elements of one Philox block;
//            with channels last four neighbouring pixels of a channel, whose numbers are in one Philox block or two.
//            Stochastic depth: a row of blocks for each sample, which has one number. Channels of samples: the same for each
//            of them with channels first; with channels last maps of channels.cuh, whose constants are of a sample.
// Limit      memory bandwidth; with channels last also the second Philox block.
#include "channels.cuh"
#include "mbc_control.h"
#include "philox.cuh"
#include "move_arguments.h"

namespace mbc {

struct Mask {
  const MbcControl* control;
  uint64_t threshold;
  uint32_t key;
  float scale;

  __device__ Words words(int64_t block) const {
    return philox(control->seed, static_cast<uint64_t>(block), static_cast<uint32_t>(control->step), key);
  }
  __device__ float operator()(float x, uint32_t word) const { return word < threshold ? x * scale : 0.0f; }
  // Factor of the element `number` alone; its word is chosen by comparisons, so that all words stay in registers.
  __device__ float factor(int64_t number) const {
    const Words of_block = words(number / 4);
    uint32_t word = of_block.v[0];
#pragma unroll
    for (int w = 1; w < 4; ++w)
      if (number % 4 == w) word = of_block.v[w];
    return (*this)(1.0f, word);
  }
};

// Flat: a thread computes the elements of one block; `first` is the number of element 0 in the mini-batch.
template <typename T>
__global__ void dropout_first(const T* x, T* y, int64_t elements, int64_t first, bool whole, Mask mask) {
  const int64_t begin = first / 4, blocks = (first + elements + 3) / 4 - begin;
  for (int64_t i = thread_index(); i < blocks; i += thread_count()) {
    const Words words = mask.words(begin + i);
    const int64_t at = (begin + i) * 4 - first;
    if (whole && at + 4 <= elements) {
      Vec<T, 4> v = load<4>(x + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) v.v[j] = from_float<T>(mask(to_float(v.v[j]), words.v[j]));
      store(y + at, v);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (at + j >= 0 && at + j < elements) y[at + j] = from_float<T>(mask(to_float(x[at + j]), words.v[j]));
    }
  }
}

// Channels last: a thread computes 4 neighbouring pixels of one channel, whose numbers are in one block or two.
// `steps`: inner is the channel, middle the group of 4 pixels.
template <typename T>
__global__ void dropout_last(const T* x, T* y, int64_t groups, int64_t channels, int64_t inner, int64_t first_row,
                             Steps steps, Mask mask) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < groups; i += stride, at.advance(steps)) {
    const int64_t pixel = at.middle * 4, number = ((first_row + at.outer) * channels + at.inner) * inner + pixel;
    const int64_t base = (at.outer * inner + pixel) * channels + at.inner;
    const int shift = static_cast<int>(number % 4);
    const Words low = mask.words(number / 4);
    const Words high = shift == 0 ? low : mask.words(number / 4 + 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (pixel + j >= inner) break;
      uint32_t word = 0;
      // Selected by comparison, so that the words stay in registers.
#pragma unroll
      for (int w = 0; w < 8; ++w)
        if (shift + j == w) word = w < 4 ? low.v[w & 3] : high.v[w & 3];
      const int64_t e = base + j * channels;
      y[e] = from_float<T>(mask(to_float(x[e]), word));
    }
  }
}

// Whole samples, in any layout. A dropped sample is not read.
template <typename T, int N>
__global__ void drop_samples(const T* x, T* y, int64_t rows, int64_t vectors, int64_t first_row, Mask mask) {
  for (int64_t n = blockIdx.y; n < rows; n += gridDim.y) {
    const float scale = mask.factor(first_row + n);
    for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
      const int64_t at = (n * vectors + i) * N;
      Vec<T, N> v{};
      if (scale != 0.0f) v = load<N>(x + at);
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(scale == 0.0f ? 0.0f : to_float(v.v[j]) * scale);
      store(y + at, v);
    }
  }
}

constexpr int64_t MOST_SAMPLES = 65535;  // blocks along z

// Channels of samples, channels last: constants of a channel of a sample.
struct DropChannels {
  Mask mask;
  int64_t first;  // number of the first channel of the first sample

  using Channel = float;
  __device__ float load(int64_t c) const {
    return mask.factor(first + c);
  }
  __device__ float operator()(float scale, float x, float) const { return scale == 0.0f ? 0.0f : x * scale; }
};

inline Mask mask_of(const MbcCall& call) {
  const auto& a = arguments<DropoutArguments>(call);
  return {in<MbcControl>(call, 1), static_cast<uint64_t>(a.threshold), static_cast<uint32_t>(a.key),
          static_cast<float>(call.reals[0])};
}

}  // namespace mbc

// Gradients use these launchers, too, with the mask of the forward pass.
extern "C" const char* mbc_dropout(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DropoutArguments>(call);
  const Mask mask = mask_of(call);
  const int64_t row = a.channels * a.inner, elements = a.rows * row, first = a.first_row * row;
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 2);
    if (a.layout == MBC_CHANNELS_FIRST || a.inner == 1 || a.channels == 1) {
      const bool whole = first % 4 == 0 && aligned(x, 4 * sizeof(T)) && aligned(y, 4 * sizeof(T));
      MBC_LAUNCH((dropout_first<T>), blocks_for(elements / 4 + 2), THREADS, call.stream, x, y, elements, first, whole,
                 mask);
    } else {
      const int64_t per_plane = divide_up(a.inner, 4), groups = a.rows * per_plane * a.channels;
      const unsigned blocks = blocks_for(groups);
      MBC_LAUNCH((dropout_last<T>), blocks, THREADS, call.stream, x, y, groups, a.channels, a.inner, a.first_row,
                 Steps(a.channels, per_plane, static_cast<int64_t>(blocks) * THREADS), mask);
    }
  });
  return launched();
}

namespace mbc {

// `rows` lines of `row` elements with one number each.
inline const char* drop_lines(const MbcCall& call, int64_t rows, int64_t row, int64_t first) {
  MBC_FOR_TYPE(arguments<DropoutArguments>(call).type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 2);
    by_vectors<WIDTH<T>>(row % WIDTH<T> == 0 && aligned(x, 16) && aligned(y, 16), [&](auto n) {
      const dim3 grid(blocks_for(divide_up(row / n, 4)), static_cast<unsigned>(rows < 65535 ? rows : 65535));
      MBC_LAUNCH((drop_samples<T, n>), grid, THREADS, call.stream, x, y, rows, row / n, first, mask_of(call));
    });
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_drop_path(const MbcCall& call) {
  const auto& a = mbc::arguments<DropoutArguments>(call);
  return mbc::drop_lines(call, a.rows, a.channels * a.inner, a.first_row);
}

extern "C" const char* mbc_channel_dropout(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DropoutArguments>(call);
  const int64_t first = a.first_row * a.channels;
  if (a.layout == MBC_CHANNELS_FIRST) return drop_lines(call, a.rows * a.channels, a.inner, first);
  MBC_FOR_TYPE(a.type, T, {
    for (int64_t n = 0; n < a.rows; n += MOST_SAMPLES) {
      const int64_t at = n * a.channels * a.inner;
      const MapBody<T, 0, false, StoreResult<T>, DropChannels> body{
          {in<T>(call, 0) + at, nullptr}, {out<T>(call, 2) + at}, {mask_of(call), first + n * a.channels}};
      run_map(call.stream, a.layout, 1, a.channels, a.inner, body, min(a.rows - n, MOST_SAMPLES));
    }
  });
  return launched();
}
