// A set is the elements that are normalized together: the channels of a group and all pixels of an image, or the
// channels of one pixel. This file says how threads hold a set, and runs a functor for every set of a tensor.
#pragma once

#include "images.cuh"
#include "group_norm_arguments.h"

namespace mbc {

constexpr int SET_WARPS = THREADS / 32, MOST_WARP_VECTORS = 512;

struct SetPlace {
  int64_t at, channel;  // of a vector: its first element, and the channel of that element
};

struct NormSets {
  int64_t channels, inner, per_row, width, pixels;  // sets of a row; channels and pixels of a set
  bool pixelwise, last;                             // each pixel is a set; channels last, or only one channel

  template <typename Arguments>
  explicit NormSets(const Arguments& a)
      : channels(a.channels), inner(a.inner), per_row(a.groups == 0 ? a.inner : a.groups),
        width(a.groups == 0 ? a.channels : a.channels / a.groups), pixels(a.groups == 0 ? 1 : a.inner),
        pixelwise(a.groups == 0), last(pixelwise || a.layout == MBC_CHANNELS_LAST) {}

  __device__ int64_t elements() const { return width * pixels; }
  bool vectorizable(int n) const { return (last ? width : pixels) % n == 0; }

  // Vector v of set g of row n.
  template <int N>
  __device__ SetPlace place(int64_t n, int64_t g, int64_t v) const {
    const int64_t c = pixelwise ? 0 : g * width, s = pixelwise ? g : 0, per_line = (last ? width : pixels) / N;
    const int64_t line = quotient(v, per_line), k = (v - line * per_line) * N;
    if (last) return {(n * inner + s + line) * channels + c + k, c + k};
    return {(n * channels + c + line) * inner + k, c + line};
  }
  // The channel of the vector's j-th element.
  __device__ int64_t channel(const SetPlace& p, int j) const { return p.channel + (last ? j : 0); }
  // With groups: the set of an element of the tensor, and of the element j channels after it if channels are last.
  __device__ int64_t set_of(int64_t at, int j) const {
    const int64_t line = quotient(at, last ? channels : inner), n = quotient(line, last ? inner : channels);
    const int64_t c = last ? at - line * channels + j : line - n * channels;
    return n * per_row + quotient(c, width);
  }
};

// The sum over `lanes` adjacent threads, a power of two, in all of them.
__device__ inline float sum_of_lanes(float sum, int lanes) {
  for (int lane = lanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}

// N elements of each operand.
template <typename T, int OPERANDS, int N>
struct SetVector {
  Held<T, N> of[OPERANDS];

  __device__ void fetch(const T* const (&operands)[OPERANDS], int64_t at) {
#pragma unroll
    for (int k = 0; k < OPERANDS; ++k) of[k] = hold<N>(operands[k] + at);
  }
  __device__ float get(int k, int j) const { return to_float(of[k][j]); }
};

// A set of a warp or a block, which is read from memory each time. Threads beyond the last set run along and store
// nothing.
//
// Both kinds of sets have
//   each(f)            f(vector, place) for every vector of this thread
//   sum(x)             the sum over the threads of the set
//   constants(c, p, x) of the channels of a vector; x if there are none
//   number, first      number of the set; whether this thread stores the results of which a set has one
template <typename T, int OPERANDS, int N, bool BLOCK>
struct CachedSet {
  const NormSets& sets;
  const T* const (&operands)[OPERANDS];
  int64_t number, n, g, vectors;
  unsigned thread;
  bool first;

  __device__ CachedSet(const NormSets& s, const T* const (&all)[OPERANDS], int64_t count) : sets(s), operands(all) {
    const int64_t own = BLOCK ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * SET_WARPS + threadIdx.y;
    number = min(own, count - 1);
    n = quotient(number, sets.per_row);
    g = number - n * sets.per_row;
    thread = BLOCK ? threadIdx.y * 32 + threadIdx.x : threadIdx.x;
    vectors = own < count ? sets.elements() / N : 0;
    first = own < count && thread == 0;
  }
  template <typename F>
  __device__ void each(F f) const {
    for (int64_t v = thread; v < vectors; v += BLOCK ? THREADS : 32) {
      const SetPlace p = sets.place<N>(n, g, v);
      SetVector<T, OPERANDS, N> vector;
      vector.fetch(operands, p.at);
      f(vector, p);
    }
  }
  __device__ float sum(float sum) const {
    sum = sum_of_lanes(sum, 32);
    if constexpr (BLOCK) {
      __shared__ float shared[SET_WARPS];
      __syncthreads();
      if (threadIdx.x == 0) shared[threadIdx.y] = sum;
      __syncthreads();
      sum = 0.0f;
      for (int i = 0; i < SET_WARPS; ++i) sum += shared[i];
    }
    return sum;
  }
  __device__ Vec<float, N> constants(const float* of_channels, const SetPlace& p, float otherwise = 1.0f) const {
    Vec<float, N> c;
#pragma unroll
    for (int j = 0; j < N; ++j) c.v[j] = of_channels ? of_channels[sets.channel(p, j)] : otherwise;
    return c;
  }
};

// The channels of a pixel, of which each lane holds V vectors, `lanes` apart.
template <typename T, int OPERANDS, int V>
struct HeldPixel {
  static constexpr int N = WIDTH<T>;
  SetVector<T, OPERANDS, N> held[V] = {};
  int64_t number, start;
  int lanes, lane, vectors;
  bool first;

  __device__ HeldPixel(const NormSets& sets, const T* const (&operands)[OPERANDS], int64_t count, int log2_lanes)
      : number(thread_index() >> log2_lanes), start(number * sets.channels), lanes(1 << log2_lanes),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        vectors(number < count ? static_cast<int>(sets.channels) / N : 0), first(lane == 0 && number < count) {
    number = min(number, count - 1);
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (lane + k * lanes < vectors) held[k].fetch(operands, start + (lane + k * lanes) * N);
  }
  template <typename F>
  __device__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int c = (lane + k * lanes) * N;
      if (lane + k * lanes < vectors) f(held[k], SetPlace{start + c, c});
    }
  }
  __device__ float sum(float sum) const { return sum_of_lanes(sum, lanes); }
  __device__ Vec<float, N> constants(const float* of_channels, const SetPlace& p, float otherwise = 1.0f) const {
    if (of_channels) return load<N>(of_channels + p.channel);
    Vec<float, N> c;
#pragma unroll
    for (int j = 0; j < N; ++j) c.v[j] = otherwise;
    return c;
  }
};

template <typename T, int N, bool BLOCK, typename F>
__global__ void each_set(int64_t count, NormSets sets, F f) {
  f.template run<N>(CachedSet<T, F::OPERANDS, N, BLOCK>(sets, f.operands, count), static_cast<float>(sets.elements()));
}

template <typename T, int N, typename F>
void run_sets(cudaStream_t stream, int64_t count, const NormSets& sets, F f) {
  const dim3 block(32, SET_WARPS);
  if (sets.width * sets.pixels / N > MOST_WARP_VECTORS)
    MBC_LAUNCH((each_set<T, N, true, F>), static_cast<unsigned>(count), block, stream, count, sets, f);
  else
    MBC_LAUNCH((each_set<T, N, false, F>), static_cast<unsigned>(divide_up(count, SET_WARPS)), block, stream, count,
               sets, f);
}

template <typename T, int V, typename F>
__global__ void each_pixel_held(int64_t count, NormSets sets, int log2_lanes, F f) {
  f.template run<WIDTH<T>>(HeldPixel<T, F::OPERANDS, V>(sets, f.operands, count, log2_lanes),
                           static_cast<float>(sets.channels));
}

// How lanes of a warp hold the vectors of a pixel: with the fewest empty places.
struct PixelTiling {
  int per_lane = 0, log2_lanes = 0;  // per_lane 0: there are too many vectors

  explicit PixelTiling(int64_t vectors) {
    for (const int each : {2, 3, 8}) {
      int log2 = 0;
      while ((int64_t{each} << log2) < vectors) ++log2;
      if (log2 > 5 || (per_lane > 0 && each << log2 >= per_lane << log2_lanes)) continue;
      per_lane = each;
      log2_lanes = log2;
    }
  }
};

template <typename T, int V, typename F>
void run_held(cudaStream_t stream, int64_t count, const NormSets& sets, int log2_lanes, F f) {
  const auto blocks = static_cast<unsigned>(divide_up(count, THREADS >> log2_lanes));
  MBC_LAUNCH((each_pixel_held<T, V, F>), blocks, THREADS, stream, count, sets, log2_lanes, f);
}

template <typename T, typename F>
void for_each_set(cudaStream_t stream, const GroupNormArguments& a, F f) {
  constexpr int N = WIDTH<T>;
  const NormSets sets(a);
  const int64_t count = a.rows * sets.per_row;
  if (!sets.vectorizable(N) || !f.vectorizable()) return run_sets<T, 1>(stream, count, sets, f);
  const PixelTiling tiling(sets.channels / N);
  if (!sets.pixelwise || tiling.per_lane == 0 || !f.constants_vectorizable(N * sizeof(float)))
    return run_sets<T, N>(stream, count, sets, f);
  switch (tiling.per_lane) {
    case 2: return run_held<T, 2>(stream, count, sets, tiling.log2_lanes, f);
    case 3: return run_held<T, 3>(stream, count, sets, tiling.log2_lanes, f);
    default: return run_held<T, 8>(stream, count, sets, tiling.log2_lanes, f);
  }
}

}  // namespace mbc
