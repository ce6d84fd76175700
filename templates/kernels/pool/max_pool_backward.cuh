// Data gradient of maximum pooling, with epilogues that use it without storing it.
//
// It gathers: every pixel reads the windows that contain it, so that no two threads write one element and the order of
// additions is fixed, by rows of windows and then by columns. With channels last and the usual windows
// (`gather_strip`), a thread walks down a column of cells, each as large as a window's stride:
//
//   windows of 3 x 3, stride 2            cell = 2 x 2 pixels, which up to 4 windows contain
//   . . . .   rows of the upper windows that reach into the next cell are `carried` in registers
#pragma once

#include <algorithm>

#include "channel_reduce.cuh"
#include "pool.cuh"

namespace mbc {

// The gradient of the pooled image. MASKED: through ReLU by p, the pooled image itself; ReLU may come before or after
// the pool.
template <typename T, bool MASKED>
struct PooledGradient {
  const uint8_t* index;
  const T *p, *dp;

  template <int N>
  struct Fetched {
    Packed<uint8_t, N> where;
    Packed<T, N> p, dp;
  };
  bool vectorizable() const { return aligned(dp, 16) && aligned(p, 16) && aligned(index, WIDTH<T>); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
    f.where = Packed<uint8_t, N>::at(index + at);
    f.dp = Packed<T, N>::at(dp + at);
    if constexpr (MASKED) f.p = Packed<T, N>::at(p + at);
    return f;
  }
  template <int N>
  __device__ static float gradient(const Fetched<N>& f, int j) {
    if constexpr (MASKED) return f.p.value(j) > 0.0f ? f.dp.value(j) : 0.0f;
    return f.dp.value(j);
  }
};

// U, the epilogue, which uses a pixel's gradient d, has
//   OPERANDS                              number of images that it reads
//   Channel load(int64_t c)               constants of a channel
//   Fetched<N> fetch<N>(int64_t at)        reads its operands of N elements from `at` on
//   use<N>(channel, fetched, at, d)        may store, and change d for a reduction
//   first<N>(fetched, d, j), second        operands of a reduction for element j (channel_reduce.cuh)
template <typename T>
struct WriteGradient {
  static constexpr int OPERANDS = 0;
  T* d;

  struct Channel {};
  template <int N>
  struct Fetched {};
  bool vectorizable() const { return aligned(d, 16); }
  __device__ Channel load(int64_t) const { return {}; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t) const { return {}; }
  template <int N>
  __device__ void use(const Channel (&)[N], const Fetched<N>&, int64_t at, float (&gradient)[N]) const {
    Packed<T, N>::of(gradient).write(d + at);
  }
  template <int N>
  __device__ float first(const Fetched<N>&, const float (&gradient)[N], int j) const { return gradient[j]; }
  template <int N>
  __device__ float second(const Fetched<N>&, const float (&)[N], int) const { return 0.0f; }
};

// Windows of any size along two axes, either layout.
template <typename T, bool MASKED>
struct Gather {
  PooledGradient<T, MASKED> pooled;
  Window window;

  template <int N>
  __device__ void sum(const Pixel& p, float (&d)[N]) const {
    constexpr int K = 2;  // windows in flight: more than two rarely contain one column
#pragma unroll
    for (int j = 0; j < N; ++j) d[j] = 0.0f;
    const PoolAxis &rows = window.rows, &columns = window.columns;
    const int32_t first = columns.first(p.x), last = columns.last(p.x);
    for (int32_t r = rows.first(p.y); r < rows.last(p.y); ++r)
      for (int32_t s = first; s < last; s += K) {
        const int64_t from = window.output.at(p.n, p.c, r, s);
        typename PooledGradient<T, MASKED>::template Fetched<N> f[K];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (s + k < last) f[k] = pooled.template fetch<N>(from + k * window.output.x_stride);
        const int32_t position = (p.y - rows.start(r)) * columns.kernel + p.x - columns.start(s);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (s + k >= last) break;
#pragma unroll
          for (int j = 0; j < N; ++j)
            if (f[k].where[j] == position - k * columns.stride)
              d[j] += PooledGradient<T, MASKED>::template gradient<N>(f[k], j);
        }
      }
  }
};

template <typename T, bool MASKED, typename U>
struct GatherPixel {
  Gather<T, MASKED> gather;
  U u;

  template <int N>
  __device__ void make(const Pixel& p, int64_t at) const {
    typename U::Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = u.load(p.c + j);
    const auto fetched = u.template fetch<N>(at);
    float d[N];
    gather.template sum<N>(p, d);
    u.template use<N>(channel, fetched, at, d);
  }
};

// The gradient of the pool's input as a source of a reduction.
template <typename T, bool MASKED, typename U>
struct GatherSource {
  static constexpr int OPERANDS = 3;
  Gather<T, MASKED> gather;
  U u;
  bool last, wide;  // channels last; everything is aligned

  template <int N>
  struct Fetched {
    typename U::template Fetched<N> own;
    float d[N];
  };
  bool vectorizable() const { return wide && last; }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    const Image& image = gather.window.input;
    const int64_t inner = image.height * image.width, n = quotient(at, image.n_stride), rest = at - n * image.n_stride;
    const int64_t s = last ? quotient(rest, image.channels) : 0, plane = last ? 0 : quotient(rest, inner);
    const int64_t c = last ? rest - s * image.channels : plane, pixel = last ? s : rest - plane * inner;
    const int64_t y = quotient(pixel, image.width);
    typename U::Channel channel[N];
#pragma unroll
    for (int j = 0; j < N; ++j) channel[j] = u.load(c + j);
    Fetched<N> f;
    f.own = u.template fetch<N>(at);
    gather.template sum<N>({n, c, static_cast<int32_t>(y), static_cast<int32_t>(pixel - y * image.width)}, f.d);
    u.template use<N>(channel, f.own, at, f.d);
    return f;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>&, const Of&, int64_t) const {}
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const { return u.template first<N>(f.own, f.d, j); }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const { return u.template second<N>(f.own, f.d, j); }
};

// Windows of size S, channels last. A thread walks down a column of cells of a window's stride; contributions of a row
// of windows to the cells below are carried in registers. `of(j)`: constants of the thread's j-th channel.
// `each(fetched, d)` is called for every pixel, after `use`.
template <typename T, int N, typename S, bool MASKED, typename U, typename Of, typename Each>
__device__ void gather_strip(const PooledGradient<T, MASKED>& pooled, const Window& window, const U& u, const Of& of,
                             const Strip& strip, int64_t c, Each each) {
  constexpr int G = S::CARRIED == 0 && U::OPERANDS == 0 ? 2 : 1;  // rows of windows in flight
  constexpr int SH = S::STRIDE_HEIGHT, SW = S::STRIDE_WIDTH, KEPT = S::CARRIED == 0 ? 1 : S::CARRIED;
  using Windows = typename PooledGradient<T, MASKED>::template Fetched<N>;
  const int32_t height = static_cast<int32_t>(window.input.height), width = static_cast<int32_t>(window.input.width);
  const int32_t out_height = static_cast<int32_t>(window.output.height);
  const int32_t column = strip.column + window.columns.before / SW;  // of cells and of their last windows
  const int32_t skipped = window.rows.before / SH;
  const int64_t channels = window.input.channels, line = window.input.y_stride, out_line = window.output.y_stride;
  const int64_t windows = strip.n * window.output.n_stride + column * channels + c;
  bool there[S::WINDOWS_ACROSS], inside[SW];
#pragma unroll
  for (int b = 0; b < S::WINDOWS_ACROSS; ++b)
    there[b] = column >= b && column - b < static_cast<int32_t>(window.output.width);
  const int32_t x = column * SW - window.columns.before;
#pragma unroll
  for (int j = 0; j < SW; ++j) inside[j] = x + j >= 0 && x + j < width;

  const auto fetch = [&](Windows(&w)[S::WINDOWS_ACROSS], int32_t row) {
    const bool any = row >= 0 && row < out_height;
#pragma unroll
    for (int b = 0; b < S::WINDOWS_ACROSS; ++b) {
      if (any && there[b]) {
        w[b] = pooled.template fetch<N>(windows + row * out_line - b * channels);
      } else {
        w[b] = {};
#pragma unroll
        for (auto& word : w[b].where.words) word = static_cast<std::decay_t<decltype(word)>>(0xffffffffu);
      }
    }
  };
  // Adds the contributions of the row of windows w to row i and column j of the cells under it.
  const auto add = [&](float(&d)[N], const float (&gradients)[S::WINDOWS_ACROSS][N], const Windows(&w)[S::WINDOWS_ACROSS], int i,
                       int j) {
#pragma unroll
    for (int b = S::WINDOWS_ACROSS - 1; b >= 0; --b) {
      if (j + b * SW >= S::KERNEL_WIDTH) continue;
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (w[b].where[e] == i * S::KERNEL_WIDTH + j + b * SW) d[e] += gradients[b][e];
    }
  };
  const auto unpack = [&](float(&gradients)[S::WINDOWS_ACROSS][N], const Windows(&w)[S::WINDOWS_ACROSS]) {
#pragma unroll
    for (int b = 0; b < S::WINDOWS_ACROSS; ++b)
#pragma unroll
      for (int e = 0; e < N; ++e) gradients[b][e] = PooledGradient<T, MASKED>::template gradient<N>(w[b], e);
  };
  float carried[KEPT][SW][N] = {};
  const auto carry = [&](const float (&gradients)[S::WINDOWS_ACROSS][N], const Windows(&w)[S::WINDOWS_ACROSS]) {
#pragma unroll
    for (int i = 0; i < S::CARRIED; ++i)
#pragma unroll
      for (int j = 0; j < SW; ++j) {
        const bool before = i + SH < S::CARRIED;
#pragma unroll
        for (int e = 0; e < N; ++e) carried[i][j][e] = before ? carried[before ? i + SH : 0][j][e] : 0.0f;
        add(carried[i][j], gradients, w, i + SH, j);
      }
  };

  int32_t row = strip.first + skipped;
#pragma unroll
  for (int a = S::ABOVE; a > 0; --a) {
    Windows w[S::WINDOWS_ACROSS];
    float gradients[S::WINDOWS_ACROSS][N];
    fetch(w, row - a);
    unpack(gradients, w);
    carry(gradients, w);
  }
  int32_t y = row * SH - window.rows.before;
  int64_t at = strip.n * window.input.n_stride + y * line + x * channels + c;
  for (int32_t left = strip.last - strip.first; left > 0; left -= G, row += G, y += G * SH, at += G * SH * line) {
    Windows w[G][S::WINDOWS_ACROSS];
    typename U::template Fetched<N> own[G * SH][SW];
#pragma unroll
    for (int g = 0; g < G; ++g) fetch(w[g], row + g);
    const auto pixel = [&](int i, int j) { return i < left * SH && y + i >= 0 && y + i < height && inside[j]; };
#pragma unroll
    for (int i = 0; i < G * SH; ++i)
#pragma unroll
      for (int j = 0; j < SW; ++j)
        if (pixel(i, j)) own[i][j] = u.template fetch<N>(at + i * line + j * channels);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float gradients[S::WINDOWS_ACROSS][N];
      unpack(gradients, w[g]);
#pragma unroll
      for (int i = 0; i < SH; ++i) {
#pragma unroll
        for (int j = 0; j < SW; ++j) {
          float d[N];
#pragma unroll
          for (int e = 0; e < N; ++e) d[e] = i < S::CARRIED ? carried[i < S::CARRIED ? i : 0][j][e] : 0.0f;
          add(d, gradients, w[g], i, j);
          const int under = g * SH + i;
          if (pixel(under, j)) {
            typename U::Channel channel[N];
#pragma unroll
            for (int e = 0; e < N; ++e) channel[e] = of(e);
            u.template use<N>(channel, own[under][j], at + under * line + j * channels, d);
            each(own[under][j], d);
          }
        }
      }
      carry(gradients, w[g]);
    }
  }
}

template <typename T, int N, typename S, bool MASKED, typename U>
__global__ void __launch_bounds__(THREADS, 2)
    gather_strips(PooledGradient<T, MASKED> pooled, Window window, Strips strips, U u) {
  __shared__ ChannelTable<typename U::Channel, N> table;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  table.fill(window.input.channels, u, blockIdx.y);
  __syncthreads();
  if (item >= strips.count || c >= window.input.channels) return;
  gather_strip<T, N, S>(pooled, window, u, [&](int j) { return table.take(j); }, Strip(strips, item), c,
                        [](const typename U::template Fetched<N>&, const float (&)[N]) {});
}

template <typename T, int N, typename S, bool MASKED, typename U, typename R>
__global__ void __launch_bounds__(THREADS, 2)
    reduce_strips(PooledGradient<T, MASKED> pooled, Window window, Strips strips, U u, typename R::State* partial, R r) {
  __shared__ typename R::State shared[N * THREADS];
  __shared__ ChannelTable<typename U::Channel, N> table_u;
  __shared__ ChannelTable<typename R::Channel, N> table_r;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int64_t channels = window.input.channels;
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  table_u.fill(channels, u);
  table_r.fill(channels, r);
  __syncthreads();
  if (c < channels) {
    const PartRange share(strips.count);
    typename R::Running running[N];
#pragma unroll
    for (int j = 0; j < N; ++j) running[j] = r.begin(0.0f);
    for (int64_t item = share.begin + threadIdx.y; item < share.end; item += blockDim.y)
      gather_strip<T, N, S>(pooled, window, u, [&](int j) { return table_u.take(j); }, Strip(strips, item), c,
                            [&](const typename U::template Fetched<N>& own, const float (&d)[N]) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float a[1] = {u.template first<N>(own, d, j)}, b[1] = {u.template second<N>(own, d, j)};
          r.template push<1>(running[j], table_r.take(j), a, b);
        }
      });
#pragma unroll
    for (int j = 0; j < N; ++j) shared[j * THREADS + thread] = r.thread_state(table_r.take(j), running[j], 0);
  }
  merge_threads<N>(shared, r);
  for (unsigned j = threadIdx.y; j < N; j += blockDim.y)
    if (c < channels) store_partial(partial, shared[j * THREADS + threadIdx.x], channels, c + j, r);
}

// Cells of a window's stride over an image: their rows or columns.
inline int64_t cells(int64_t extent, int64_t pad, int64_t stride) {
  return (pad + extent - 1) / stride - pad / stride + 1;
}

// Calls `run(Fixed<...>, strips)` if strips apply; returns whether they do. `least`: see `Strips`.
template <typename T, typename Run>
bool for_strips(const PoolArguments& a, int64_t vectors, bool wide, int64_t least, Run run) {
  return wide && a.layout == MBC_CHANNELS_LAST && for_usual_window<T>(a, [&](auto size) {
           using S = decltype(size);
           run(size, Strips(vectors, a.rows, cells(a.width, a.pad_left, S::STRIDE_WIDTH),
                            cells(a.height, a.pad_top, S::STRIDE_HEIGHT), S::LOWEST, least));
         });
}

template <typename T, bool MASKED, typename U>
void gather_pool(cudaStream_t stream, const PoolArguments& a, const PooledGradient<T, MASKED>& pooled, U u) {
  constexpr int N = WIDTH<T>;
  const bool wide = pooled.vectorizable() && u.vectorizable() && a.channels % N == 0;
  const int64_t vectors = a.channels / N;
  const bool done = for_strips<T>(a, vectors, wide, wide ? MANY_THREADS / vectors : 0, [&](auto size, Strips strips) {
    const dim3 grid(static_cast<unsigned>(divide_up(strips.count, strips.threads_y)), strips.tiles);
    MBC_LAUNCH((gather_strips<T, N, decltype(size), MASKED, U>), grid, dim3(strips.threads_x, strips.threads_y), stream, pooled,
               Window(a), strips, u);
  });
  if (!done)
    for_each_pixel<N>(stream, a.layout, a.rows, Image(a.layout, a.channels, a.height, a.width), wide,
                      GatherPixel<T, MASKED, U>{{pooled, Window(a)}, u});
}

// The data gradient with sums over all pixels of each channel, in `parts` (channel_reduce.cuh).
template <typename T, bool MASKED, typename U, typename R>
void gather_pool_sums(cudaStream_t stream, const PoolArguments& a, const PooledGradient<T, MASKED>& pooled, U u, int64_t parts,
                      void* workspace, R r) {
  constexpr int N = WIDTH<T>;
  const bool wide = pooled.vectorizable() && u.vectorizable() && a.channels % N == 0;
  const int64_t vectors = a.channels / N, inner = a.height * a.width;
  const int64_t least = wide ? 4 * parts * (THREADS / std::min<int64_t>(vectors, 32)) : 0;  // four strips for every thread
  auto* partial = static_cast<typename R::State*>(workspace);
  const bool done = for_strips<T>(a, vectors, wide, least, [&](auto size, Strips strips) {
    const dim3 grid(strips.tiles, static_cast<unsigned>(parts));
    MBC_LAUNCH((reduce_strips<T, N, decltype(size), MASKED, U, R>), grid, dim3(strips.threads_x, strips.threads_y), stream,
               pooled, Window(a), strips, u, partial, r);
  });
  if (!done) {
    const GatherSource<T, MASKED, U> source{{pooled, Window(a)}, u, a.layout == MBC_CHANNELS_LAST, wide};
    reduce_channels_of<T>(stream, a.layout, a.rows, a.channels, inner, parts, source, workspace, r);
  } else if (parts > 1) {
    merge_all_parts(stream, parts, a.channels, static_cast<const typename R::State*>(workspace), r);
  }
}

}  // namespace mbc
