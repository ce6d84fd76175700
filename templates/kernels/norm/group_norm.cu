// Group and layer normalisation: what is normalised together, a set, is the channels of a group and all pixels of an
// image, or the channels of one pixel. Forward and backward are one launch each, in place or not; the gradients of
// scale and shift are reductions by channel (channel_reduce.cuh).
//
// Bytes      the tensors in and out once; a set is read again (forward twice, backward once) from the cache.
// Threads    a set of up to 512 vectors is a warp's, 8 of them a block; a larger one is a block's. Vectors of 16 bytes:
//            of pixels channels first, of channels channels last. Sums have a fixed order.
// Limit      memory bandwidth; of few large sets the number of blocks.
#include "batch_norm.cuh"
#include "images.cuh"

struct GroupNormArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t inner;
  int64_t groups;  // 0: each pixel by itself
};

struct GroupNormReduceArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t inner;
  int64_t groups;
  int64_t parts;
  int64_t accumulate;
};

namespace mbc {

constexpr int SET_WARPS = THREADS / 32, MOST_WARP_VECTORS = 512;

struct SetPlace {
  int64_t at, channel;  // of a vector: its first element, and that one's channel
};

struct NormSets {
  int64_t channels, inner, per_row, width, pixels;  // sets of a row; channels and pixels of a set
  bool pixelwise, last;                             // each pixel by itself; channels last, which one channel is, too

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
  // The channel of its j-th element.
  __device__ int64_t channel(const SetPlace& p, int j) const { return p.channel + (last ? j : 0); }
  // The set of an element of the tensor, and of the one j channels on where channels are last.
  __device__ int64_t set_of(int64_t at, int j) const {
    if (pixelwise) return quotient(at, channels);
    const int64_t line = quotient(at, last ? channels : inner), n = quotient(line, last ? inner : channels);
    const int64_t c = last ? at - line * channels + j : line - n * channels;
    return n * per_row + quotient(c, width);
  }
};

// The same sum in all threads of a warp, or of a block.
template <bool BLOCK>
__device__ float sum_of_set(float sum) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
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

template <typename T>
struct NormalizeSets {
  const T* x;
  T* y;
  const float *gamma, *beta;
  float *mean, *inverse;
  float eps;

  bool vectorizable() const { return aligned(x, 16) && aligned(y, 16); }

  // `each(f)` calls f(place) for every vector of this thread.
  template <int N, bool BLOCK, typename Each>
  __device__ void run(const NormSets& sets, int64_t set, bool writes, Each each) const {
    const auto count = static_cast<float>(sets.elements());
    float sum = 0.0f, squares = 0.0f;
    each([&](const SetPlace& p) {
      const Vec<T, N> v = load<N>(x + p.at);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += to_float(v.v[j]);
    });
    const float m = sum_of_set<BLOCK>(sum) / count;
    each([&](const SetPlace& p) {
      const Vec<T, N> v = load<N>(x + p.at);
#pragma unroll
      for (int j = 0; j < N; ++j) squares = fmaf(to_float(v.v[j]) - m, to_float(v.v[j]) - m, squares);
    });
    const float scale = 1.0f / sqrtf(sum_of_set<BLOCK>(squares) / count + eps);
    each([&](const SetPlace& p) {
      Vec<T, N> v = load<N>(x + p.at);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int64_t c = sets.channel(p, j);
        v.v[j] = from_float<T>(fmaf((to_float(v.v[j]) - m) * scale, gamma[c], beta[c]));
      }
      store(y + p.at, v);
    });
    if (writes) mean[set] = m, inverse[set] = scale;
  }
};

template <typename T>
struct NormalizeSetsBackward {
  const T *x, *dy;
  T* dx;
  const float *mean, *inverse, *gamma;

  bool vectorizable() const { return aligned(x, 16) && aligned(dy, 16) && aligned(dx, 16); }

  template <int N, bool BLOCK, typename Each>
  __device__ void run(const NormSets& sets, int64_t set, bool, Each each) const {
    const auto count = static_cast<float>(sets.elements());
    const float m = mean[set], scale = inverse[set];
    float sum = 0.0f, dot = 0.0f;
    each([&](const SetPlace& p) {
      const Vec<T, N> v = load<N>(x + p.at), d = load<N>(dy + p.at);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float g = to_float(d.v[j]) * gamma[sets.channel(p, j)];
        sum += g;
        dot = fmaf(g, (to_float(v.v[j]) - m) * scale, dot);
      }
    });
    const float shift = sum_of_set<BLOCK>(sum) / count, slope = sum_of_set<BLOCK>(dot) / count;
    each([&](const SetPlace& p) {
      const Vec<T, N> v = load<N>(x + p.at);
      Vec<T, N> d = load<N>(dy + p.at);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float g = to_float(d.v[j]) * gamma[sets.channel(p, j)];
        d.v[j] = from_float<T>(scale * (g - shift - (to_float(v.v[j]) - m) * scale * slope));
      }
      store(dx + p.at, d);
    });
  }
};

template <int N, bool BLOCK, typename F>
__global__ void each_set(int64_t count, NormSets sets, F f) {
  const int64_t number = BLOCK ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * SET_WARPS + threadIdx.y;
  // Warps beyond the last set go along with it, and store nothing.
  const bool within = number < count;
  const int64_t set = within ? number : count - 1, n = quotient(set, sets.per_row), g = set - n * sets.per_row;
  const unsigned thread = BLOCK ? threadIdx.y * 32 + threadIdx.x : threadIdx.x, step = BLOCK ? THREADS : 32;
  const int64_t vectors = within ? sets.elements() / N : 0;
  f.template run<N, BLOCK>(sets, set, within && thread == 0, [&](auto&& of) {
    for (int64_t v = thread; v < vectors; v += step) of(sets.place<N>(n, g, v));
  });
}

template <int N, typename F>
void run_sets(cudaStream_t stream, int64_t rows, const NormSets& sets, F f) {
  const int64_t count = rows * sets.per_row;
  if (sets.width * sets.pixels / N > MOST_WARP_VECTORS)
    MBC_LAUNCH((each_set<N, true, F>), static_cast<unsigned>(count), dim3(32, SET_WARPS), stream, count, sets, f);
  else
    MBC_LAUNCH((each_set<N, false, F>), static_cast<unsigned>(divide_up(count, SET_WARPS)), dim3(32, SET_WARPS), stream,
               count, sets, f);
}

template <typename T, typename F>
void for_each_set(cudaStream_t stream, const GroupNormArguments& a, F f) {
  const NormSets sets(a);
  if (sets.vectorizable(WIDTH<T>) && f.vectorizable())
    run_sets<WIDTH<T>>(stream, a.rows, sets, f);
  else
    run_sets<1>(stream, a.rows, sets, f);
}

// What the gradients of scale and shift are reduced from: normalised elements, and dy.
template <typename T>
struct NormalizedSource {
  static constexpr int OPERANDS = 2;
  const T *x, *dy;
  const float *mean, *inverse;
  NormSets sets;

  template <int N>
  struct Fetched {
    float normal[N];
    Held<T, N> dy;
  };
  bool vectorizable() const { return aligned(x, 16) && aligned(dy, 16); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
    f.dy = hold<N>(dy + at);
    const Held<T, N> v = hold<N>(x + at);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int64_t set = sets.set_of(at, j);
      f.normal[j] = (to_float(v[j]) - mean[set]) * inverse[set];
    }
    return f;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>&, const Of&, int64_t) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const { return f.normal[j]; }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const { return to_float(f.dy[j]); }
};

// That of batch normalisation, of elements that are normalised already.
struct NormalizedReduction : BnBackwardReduction {
  __device__ Channel load(int64_t) const { return 0.0f; }
  __device__ Known known(int64_t c) const {
    return {1.0f, accumulate ? dgamma[c] : 0.0f, accumulate ? dbeta[c] : 0.0f};
  }
};

}  // namespace mbc

extern "C" const char* mbc_group_norm(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSets<T>{in<T>(call, 0), out<T>(call, 3), in<float>(call, 1), in<float>(call, 2),
                                     out<float>(call, 4), out<float>(call, 5), eps(call, 0)});
  });
  return launched();
}

extern "C" const char* mbc_group_norm_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    for_each_set<T>(call.stream, a,
                    NormalizeSetsBackward<T>{in<T>(call, 0), in<T>(call, 1), out<T>(call, 5), in<float>(call, 2),
                                             in<float>(call, 3), in<float>(call, 4)});
  });
  return launched();
}

extern "C" const char* mbc_group_norm_backward_reduce(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GroupNormReduceArguments>(call);
  void* workspace = a.parts > 1 ? call.pointers[6] : nullptr;
  const NormSets sets(a);
  const NormalizedReduction reduction{{nullptr, nullptr, out<float>(call, 4), out<float>(call, 5), 0.0f, a.accumulate}};
  MBC_FOR_TYPE(a.type, T, {
    const NormalizedSource<T> source{in<T>(call, 0), in<T>(call, 1), in<float>(call, 2), in<float>(call, 3), sets};
    reduce_channels_of<T>(call.stream, sets.last ? MBC_CHANNELS_LAST : a.layout, a.rows, a.channels, a.inner, a.parts,
                          source, workspace, reduction);
  });
  return launched();
}

extern "C" const char* mbc_layer_norm(const MbcCall& call) { return mbc_group_norm(call); }
extern "C" const char* mbc_layer_norm_backward(const MbcCall& call) { return mbc_group_norm_backward(call); }
extern "C" const char* mbc_layer_norm_backward_reduce(const MbcCall& call) {
  return mbc_group_norm_backward_reduce(call);
}
