// Maximum pooling, optionally with a bias, batch normalization or ReLU in the prologue. An index, the position of the
// maximum in its window, is written if the backward pass needs it.
//
// Among equal elements the first one wins, in the order of rows and then of columns; NaN wins over all numbers.
//
// Bytes      image in once, result and one byte of index for each element out; the result of the prologue as well, if
//            other launches read it.
// Kernels    channels last with the usual windows (`max_pool_strips`): a thread keeps 16 bytes of channels and walks
//            down a strip of the output; maxima of rows that two windows share stay in registers. Otherwise (`MaxPool`) a
//            thread computes an output element, or 16 bytes of channels.
// Limit      memory bandwidth; in 16 bits comparisons, which are done on keys of element and position.
#include "batch_norm.cuh"
#include "pool.cuh"
#include "max_pool_operands.h"

namespace mbc {

// Prologues: the pooled value is `before` of an element, with RELU relu of that; DIRECT: `before` is the identity;
// WRITTEN: the result of the prologue is stored as well.
struct IdentityPrologue {
  static constexpr bool DIRECT = true, RELU = false, WRITTEN = false;
  struct Channel {};
  __device__ Channel load(int64_t) const { return {}; }
  __device__ float before(const Channel&, float x) const { return x; }
};

struct ReluPrologue : IdentityPrologue {
  static constexpr bool RELU = true;
};

struct BiasReluPrologue {
  static constexpr bool DIRECT = false, RELU = true, WRITTEN = false;
  const float* bias;
  using Channel = float;
  __device__ float load(int64_t c) const { return bias[c]; }
  __device__ float before(float b, float x) const { return x + b; }
};

struct NormalizeReluPrologue {
  static constexpr bool DIRECT = false, RELU = true, WRITTEN = false;
  Normalize normalize;
  using Channel = Normalize::Channel;
  __device__ Channel load(int64_t c) const { return normalize.load(c); }
  __device__ float before(const Channel& channel, float x) const { return normalize(channel, x, 0.0f); }
};

// Windows must not overlap, since each stores its pixels.
struct NormalizeReluStoredPrologue : NormalizeReluPrologue {
  static constexpr bool WRITTEN = true;
};

// Rounded as a stored image is, so that the maximum has the same position.
template <typename T, typename F>
__device__ inline float pooled(const F& f, const typename F::Channel& channel, float x) {
  const float value = F::RELU ? relu(f.before(channel, x)) : f.before(channel, x);
  return F::DIRECT ? value : to_float(from_float<T>(value));
}

__device__ inline bool wins(float value, float over) { return value > over || isnan(value); }

template <typename T, int N>
__device__ inline void store_maxima(T* y, uint8_t* index, int64_t at, const float (&best)[N], const uint8_t (&where)[N]) {
  store_floats(y + at, best);
  if (index == nullptr) return;
  Vec<uint8_t, N> positions;
#pragma unroll
  for (int j = 0; j < N; ++j) positions.v[j] = where[j];
  store(index + at, positions);
}

// Windows of any size along two axes.
template <typename T, typename F>
struct MaxPool {
  const T* x;
  T* image;  // the result of the prologue, if WRITTEN
  T* y;
  uint8_t* index;  // null: no index is written
  Window window;
  F f;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    constexpr int K = 4;  // columns in flight
    const PoolAxis &rows = window.rows, &columns = window.columns;
    const int32_t above = rows.start(p.y), before = columns.start(p.x);
    const int32_t top = rows.low(p.y), left = columns.low(p.x), right = columns.high(p.x);
    typename F::Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = f.load(p.c + j);
    float best[N];
    uint8_t where[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      best[j] = -INFINITY;
      where[j] = static_cast<uint8_t>((top - above) * columns.kernel + left - before);
    }
    for (int32_t r = top; r < rows.high(p.y); ++r)
      for (int32_t s = left; s < right; s += K) {
        const int64_t from = window.input.at(p.n, p.c, r, s);
        Vec<T, N> v[K];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (s + k < right) v[k] = load<N>(x + from + k * window.input.x_stride);
        const int32_t position = (r - above) * columns.kernel + s - before;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (s + k >= right) break;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float value = pooled<T>(f, channel[j], to_float(v[k].v[j]));
            if (wins(value, best[j])) best[j] = value, where[j] = static_cast<uint8_t>(position + k);
            if constexpr (F::WRITTEN) v[k].v[j] = from_float<T>(value);
          }
          if constexpr (F::WRITTEN) store(image + from + k * window.input.x_stride, v[k]);
        }
      }
    store_maxima(y, index, at, best, where);
  }
};

// Windows along three axes, or with dilation.
template <typename T>
struct AnyMaxPool {
  const T* x;
  T* y;
  uint8_t* index;  // null: no index is written
  Window window;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    float best[N];
    uint8_t where[N];
    bool first = true;
    window.each_pixel<true>(p, [&](int32_t position, int64_t from) {
      const Vec<T, N> v = load<N>(x + from);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float value = to_float(v.v[j]);
        if (first || wins(value, best[j])) best[j] = value, where[j] = static_cast<uint8_t>(position);
      }
      first = false;
    });
    store_maxima(y, index, at, best, where);
  }
};

// The maximum so far of N channels, and its position among K.
template <typename T, int N, int K>
struct Best {
  float value[N];
  int32_t where[N];

  __device__ Best() {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = -INFINITY, where[j] = -1;
  }
  // Merges a later maximum, `offset` positions further on.
  __device__ void take(const Best& later, int32_t offset) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (wins(later.value[j], value[j])) value[j] = later.value[j], where[j] = later.where[j] + offset;
  }
  // Merges the elements at `position`; `v` becomes the result of the prologue, if WRITTEN.
  template <typename F>
  __device__ void take(Packed<T, N>& v, const F& f, const typename F::Channel (&channel)[N], int32_t position) {
    float elements[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      elements[j] = pooled<T>(f, channel[j], v.value(j));
      if (wins(elements[j], value[j])) value[j] = elements[j], where[j] = position;
    }
    if constexpr (F::WRITTEN) v = Packed<T, N>::of(elements);
  }
  // `start`: the first position that is not padding, which wins if all elements are -infinity.
  __device__ void write(T* y, uint8_t* index, int32_t start) const {
    Packed<T, N>::of(value).write(y);
    if (index == nullptr) return;
    Vec<uint8_t, N> positions;
#pragma unroll
    for (int j = 0; j < N; ++j) positions.v[j] = static_cast<uint8_t>(where[j] < 0 ? start : where[j]);
    store(index, positions);
  }
};

#ifndef MBC_EMULATED
template <typename T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
#endif

// Two elements, optionally with relu: -0 becomes 0, and every NaN becomes the NaN that compares greater than all
// numbers.
template <typename T, bool RELU>
__device__ inline uint32_t canonical(uint32_t pair) {
#ifdef MBC_EMULATED
  Packed<T, 2> elements;
  elements.words[0] = pair;
  float values[2];
  for (int j = 0; j < 2; ++j) {
    const float value = elements.value(j);
    values[j] = isnan(value) ? NAN : RELU ? max(value, 0.0f) + 0.0f : value + 0.0f;
  }
  return Packed<T, 2>::of(values).words[0];
#else
  using Pair = typename PairOf<T>::Type;
  const uint32_t nothing = 0;
  Pair value, zero;
  memcpy(&value, &pair, sizeof(pair));
  memcpy(&zero, &nothing, sizeof(nothing));
  value = RELU ? __hmax2_nan(value, zero) : __hadd2(value, zero);
  memcpy(&pair, &value, sizeof(pair));
  return pair;
#endif
}

// Maps 16-bit floating-point numbers to signed integers of the same order; it is its own inverse.
__device__ inline uint32_t ordered(uint32_t pair) { return pair ^ ((pair >> 15 & 0x00010001u) * 0x7fffu); }

// Elements of two bytes: value and position in one integer, so that one integer maximum finds both. Among equal
// elements the first wins, among several NaN, too.
template <typename T, int N, int K, bool SIGNED>
struct Keys {
  static constexpr int32_t NONE = INT32_MIN + 0xffff;  // below minus infinity, also after a change of position
  int32_t key[N];  // value << 16 | K - 1 - position

  __device__ Keys() {
#pragma unroll
    for (int j = 0; j < N; ++j) key[j] = NONE;
  }
  __device__ void take(const Keys& later, int32_t offset) {
#pragma unroll
    for (int j = 0; j < N; ++j) key[j] = max(key[j], later.key[j] - offset);
  }
  template <typename F>
  __device__ void take(Packed<T, N>& v, const F& f, const typename F::Channel (&channel)[N], int32_t position) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      uint32_t pair = v.words[i];
      if constexpr (!F::DIRECT) {
        const float values[2] = {f.before(channel[2 * i], v.value(2 * i)),
                                 f.before(channel[2 * i + 1], v.value(2 * i + 1))};
        pair = Packed<T, 2>::of(values).words[0];
      }
      pair = canonical<T, F::RELU>(pair);
      if constexpr (F::WRITTEN) v.words[i] = pair;
      if constexpr (SIGNED) pair = ordered(pair);
      const uint32_t tie_break = static_cast<uint32_t>(K - 1 - position);
      key[2 * i] = max(key[2 * i], static_cast<int32_t>(pair << 16 | tie_break));
      key[2 * i + 1] = max(key[2 * i + 1], static_cast<int32_t>((pair & 0xffff0000u) | tie_break));
    }
  }
  __device__ void write(T* y, uint8_t* index, int32_t) const {
    Packed<T, N> values;
    Packed<uint8_t, N> positions;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const uint32_t low = static_cast<uint32_t>(key[2 * i]), high = static_cast<uint32_t>(key[2 * i + 1]);
      const uint32_t pair = low >> 16 | (high & 0xffff0000u);
      values.words[i] = SIGNED ? ordered(pair) : pair;
    }
    values.write(y);
    if (index == nullptr) return;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      uint32_t bytes = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) bytes |= (static_cast<uint32_t>(key[4 * i + j]) & 0xffu) << 8 * j;
      positions.words[i] = 0x01010101u * (K - 1) - bytes;  // byte by byte: none is larger than K - 1
    }
    positions.write(index);
  }
};

// Windows of size S, channels last, N channels for each thread. A row that windows share is searched once.
template <typename T, int N, typename S, typename F>
__global__ void __launch_bounds__(THREADS, 2)
    max_pool_strips(const T* __restrict__ x, T* __restrict__ image, T* __restrict__ y, uint8_t* __restrict__ index,
                    Window window, Strips strips, F f) {
  constexpr int G = S::CARRIED == 0 ? 2 : 1;  // windows one below the other: six or eight vectors in flight
  constexpr int FRESH = G * S::STRIDE_HEIGHT, KEPT = S::CARRIED == 0 ? 1 : S::CARRIED;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  const int64_t channels = window.input.channels;
  if (item >= strips.count || c >= channels) return;
  const Strip strip(strips, item);
  typename F::Channel channel[N];
#pragma unroll
  for (int j = 0; j < N; ++j) channel[j] = f.load(c + j);

  const int32_t height = static_cast<int32_t>(window.input.height), width = static_cast<int32_t>(window.input.width);
  const int32_t before = strip.column * S::STRIDE_WIDTH - window.columns.before;
  const int64_t line = window.input.y_stride;
  bool inside[S::KERNEL_WIDTH];
#pragma unroll
  for (int s = 0; s < S::KERNEL_WIDTH; ++s) inside[s] = before + s >= 0 && before + s < width;
  int32_t r = strip.first * S::STRIDE_HEIGHT - window.rows.before;
  int64_t from = strip.n * window.input.n_stride + r * line + before * channels + c;

  const auto there = [&](int32_t row) { return row >= 0 && row < height; };
  constexpr int K = S::KERNEL_HEIGHT * S::KERNEL_WIDTH;
  using Found = std::conditional_t<sizeof(T) == 2, Keys<T, N, K, !F::RELU>, Best<T, N, K>>;
  const auto fetch = [&](Packed<T, N>(&v)[S::KERNEL_WIDTH], int i) {
#pragma unroll
    for (int s = 0; s < S::KERNEL_WIDTH; ++s)
      if (there(r + i) && inside[s]) v[s] = Packed<T, N>::at(x + from + i * line + s * channels);
  };
  const auto search = [&](Found& best, Packed<T, N>(&v)[S::KERNEL_WIDTH], int i, int32_t position) {
#pragma unroll
    for (int s = 0; s < S::KERNEL_WIDTH; ++s)
      if (there(r + i) && inside[s]) {
        best.take(v[s], f, channel, position + s);
        if constexpr (F::WRITTEN) v[s].write(image + from + i * line + s * channels);
      }
  };

  Found carried[KEPT];  // maxima of rows, by columns
#pragma unroll
  for (int i = 0; i < S::CARRIED; ++i) {
    Packed<T, N> v[S::KERNEL_WIDTH];
    fetch(v, i);
    search(carried[i], v, i, 0);
  }
  int64_t to = (strip.n * window.output.height + strip.first) * window.output.y_stride + strip.column * channels + c;
  for (int32_t left = strip.last - strip.first; left > 0; left -= G, r += FRESH, from += FRESH * line) {
    Packed<T, N> v[FRESH][S::KERNEL_WIDTH];
#pragma unroll
    for (int i = 0; i < FRESH; ++i) fetch(v[i], S::CARRIED + i);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (g >= left) break;
      const int32_t above = r + g * S::STRIDE_HEIGHT;
      const int32_t start = max(0, -above) * S::KERNEL_WIDTH + max(0, -before);
      Found best;
#pragma unroll
      for (int i = 0; i < S::CARRIED; ++i) best.take(carried[i], i * S::KERNEL_WIDTH);
#pragma unroll
      for (int i = 0; i + 1 < S::CARRIED; ++i) carried[i] = carried[i + 1];
#pragma unroll
      for (int i = S::CARRIED; i < S::KERNEL_HEIGHT; ++i) {
        const int fresh = g * S::STRIDE_HEIGHT + i - S::CARRIED;
        if constexpr (S::CARRIED == 0) {
          search(best, v[fresh], fresh, i * S::KERNEL_WIDTH);
        } else {
          Found row;
          search(row, v[fresh], i, 0);
          best.take(row, i * S::KERNEL_WIDTH);
          if (i + 1 == S::KERNEL_HEIGHT) carried[S::CARRIED - 1] = row;
        }
      }
      best.write(y + to, index == nullptr ? nullptr : index + to, start);
      to += window.output.y_stride;
    }
  }
}

template <typename F>
const char* max_pool(const MbcCall& call, const MaxPoolOperands& at, F f) {
  const auto& a = arguments<PoolArguments>(call);
  uint8_t* index = at.index;
  MBC_FOR_TYPE(a.type, T, {
    constexpr int N = WIDTH<T>;
    const T* x = at.x;
    T *image = at.image, *y = at.y;  // image: the result of the prologue, if F::WRITTEN
    const bool wide = aligned(x, 16) && aligned(image, 16) && aligned(y, 16) && aligned(index, N) && a.channels % N == 0;
    const bool done = wide && a.layout == MBC_CHANNELS_LAST && for_usual_window<T>(a, [&](auto size) {
      using S = std::conditional_t<F::WRITTEN, Fixed<2, 2, 2, 2>, decltype(size)>;  // windows do not overlap
      const Strips strips(a.channels / N, a.rows, a.out_width, a.out_height, S::LOWEST, MANY_THREADS / (a.channels / N));
      const dim3 grid(static_cast<unsigned>(divide_up(strips.count, strips.threads_y)), strips.tiles);
      MBC_LAUNCH((max_pool_strips<T, N, S, F>), grid, dim3(strips.threads_x, strips.threads_y), call.stream, x, image, y,
                 index, Window(a), strips, f);
    });
    const Window window(a);
    const auto run = [&](auto g) { for_each_pixel<N>(call.stream, a.layout, a.rows, window.output, wide, g); };
    if constexpr (std::is_same_v<F, IdentityPrologue>) {
      if (a.any) return run(AnyMaxPool<T>{x, y, index, window}), launched();
    }
    if (!done) run(MaxPool<T, F>{x, image, y, index, window, f});
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_max_pool(const MbcCall& call) {
  using namespace mbc;
  return max_pool(call, operands_of_max_pool(call), IdentityPrologue{});
}

// The result of the prologue is not stored.
extern "C" const char* mbc_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  return max_pool(call, operands_of_relu_max_pool(call), ReluPrologue{});
}

extern "C" const char* mbc_bias_add_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  const auto at = operands_of_bias_add_relu_max_pool(call);
  return max_pool(call, at, BiasReluPrologue{at.bias});
}

extern "C" const char* mbc_batch_normalize_relu_max_pool(const MbcCall& call) {
  using namespace mbc;
  const auto at = operands_of_batch_normalize_relu_max_pool(call);
  return max_pool(call, at, NormalizeReluPrologue{normalize(at, eps(call, 0))});
}

// The result of the prologue is stored for other launches.
extern "C" const char* mbc_batch_normalize_relu_and_max_pool(const MbcCall& call) {
  using namespace mbc;
  const auto at = operands_of_batch_normalize_relu_and_max_pool(call);
  return max_pool(call, at, NormalizeReluStoredPrologue{{normalize(at, eps(call, 0))}});
}
