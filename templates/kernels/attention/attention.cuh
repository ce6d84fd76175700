// Scaled dot-product attention by tiles, forward and backward, for tensor cores or FMA (`Unit`). Dao,
// "FlashAttention-2", 2023. Here no two blocks add to one element, so that each sum has one order: the backward pass
// has one kernel for the gradient of queries and one for the gradients of keys and values, and both recompute the
// scores.
//
// A warp holds 16 rows of a product as tensor cores do: thread (g, t) = (lane / 4, lane % 4) has of each 16 x 8 the
// elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1):
//
//          2t 2t+1            The scores of a tile are at once the first operand of the product with values: their
//    g      0   1             columns are its K.
//    g + 8  2   3
#pragma once

#include "split_k.cuh"
#include "attention_arguments.h"

namespace mbc {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Query, key or value: element (row, head, group, position, channel of the head).
template <typename T>
struct Headed {
  T* data;
  int64_t row, head, group, position, channel;

  // Part `part` of `parts` tensors that share the channels.
  Headed(T* at, const AttentionArguments& a, int64_t length, int64_t part, int64_t parts) : data(at) {
    const int64_t own = a.heads * a.depth, all = own * parts;
    const bool last = a.layout == MBC_CHANNELS_LAST;
    channel = last ? 1 : a.groups * length;
    position = last ? all : 1;
    group = length * position;
    head = a.depth * channel;
    row = all * a.groups * length;
    data += part * own * channel;
  }
  __device__ T* of(int64_t n, int64_t h, int64_t g) const { return data + n * row + h * head + g * group; }
};

// Which scores count, and the bias that is added to them. Everything is in powers of two.
template <typename T>
struct Scores {
  const T* bias;  // null: no bias
  int64_t bias_head, bias_group, queries, keys;
  float scale;
  bool causal;

  __device__ const T* bias_of(int64_t h, int64_t g) const {
    return bias == nullptr ? nullptr : bias + h * bias_head + g * bias_group;
  }
  __device__ bool counts(int64_t query, int64_t key) const {
    return query < queries && key < keys && (!causal || key <= query);
  }
  __device__ float operator()(const T* added, int64_t query, int64_t key, float product) const {
    const float more = added == nullptr ? 0.0f : to_float(added[query * keys + key]);
    return fmaf(product, scale, more) * LOG2_E;
  }
};

// A block's view of a launch: operands, sizes, and its item (row, head, group).
template <typename T>
struct Attended {
  Headed<const T> q, k, v;
  Scores<T> scores;
  int64_t rows, heads, groups, depth;

  template <typename O>
  Attended(const MbcCall& call, const AttentionArguments& a, const O& at)
      : q(at.q, a, a.queries, 0, a.packed ? 3 : 1),
        k(a.packed ? at.q : at.k, a, a.keys, a.packed ? 1 : 0, a.packed ? 3 : 1),
        v(a.packed ? at.q : at.v, a, a.keys, a.packed ? 2 : 0, a.packed ? 3 : 1),
        rows(a.rows), heads(a.heads), groups(a.groups), depth(a.depth) {
    const int64_t plane = a.queries * a.keys;
    scores = {at.bias,
              a.bias_heads > 1 ? a.bias_groups * plane : 0,
              a.bias_groups > 1 ? plane : 0,
              a.queries, a.keys, real(call, 0), a.causal != 0};
  }
  int64_t items() const { return rows * heads * groups; }
};

// `Index`: 32 bits take fewer registers and instructions, and suffice for the blocks of a grid.
template <typename Index>
struct ItemAt {
  Index n, h, g;

  __device__ ItemAt(Index item, Index heads, Index groups)
      : n(item / groups / heads), h(item / groups % heads), g(item % groups) {}
};
using Item = ItemAt<int64_t>;

// Copies `count` positions from `first` on, zeros beyond the last one; channels from `depth` to D are zeros, too.
template <typename Unit, int D, typename T>
__device__ void fetch(typename Unit::Element* to, const T* from, const Headed<const T>& x, int64_t first, int64_t length,
                      int64_t depth, int count) {
  constexpr int N = Unit::WIDTH, COLUMNS = D / N;
  for (int i = threadIdx.x; i < count * COLUMNS; i += blockDim.x) {
    const bool adjacent = x.channel == 1;
    const int row = adjacent ? i / COLUMNS : i % count, column = (adjacent ? i % COLUMNS : i / count) * N;
    const bool there = first + row < length && column < depth;
    const int64_t at = there ? (first + row) * x.position + column * x.channel : 0;
    Unit::copy(to + row * Unit::template stride<D> + column, from + at, there);
  }
}

// Products by FMA of fp32 operands in shared memory; each thread computes what it would hold after a tensor-core
// product.
struct FmaUnit {
  using Element = float;
  static constexpr int WIDTH = 1;
  template <int D>
  static constexpr int stride = D + 4;
  template <int D>
  static constexpr int warps = D <= 64 ? 4 : 2;
  template <int D>
  static constexpr int walked = 16;

  template <typename T>
  static __device__ void copy(float* to, const T* from, bool there) { *to = there ? to_float(*from) : 0.0f; }
  static __device__ void arrive() {}

  // sums += A B^T, of 16 rows and 8 N rows of D elements.
  template <int D, int N>
  static __device__ void dot(float (&sums)[N][4], const float* a, const float* b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float *upper = a + g * stride<D>, *lower = upper + 8 * stride<D>;
    for (int d = 0; d < D; ++d) {
      const float x = upper[d], y = lower[d];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float* row = b + (8 * n + 2 * t) * stride<D> + d;
        sums[n][0] = fmaf(x, row[0], sums[n][0]);
        sums[n][1] = fmaf(x, row[stride<D>], sums[n][1]);
        sums[n][2] = fmaf(y, row[0], sums[n][2]);
        sums[n][3] = fmaf(y, row[stride<D>], sums[n][3]);
      }
    }
  }
  // sums += P B, of 16 x 8 N elements in registers and 8 N rows of D.
  template <int D, int N>
  static __device__ void mix(float (&sums)[D / 8][4], const float (&p)[N][4], const float* b) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 8 * N; ++c) {
      const int from = lane / 4 * 4 + c % 8 / 2;
      const float x = __shfl_sync(0xffffffffu, p[c / 8][c % 2], from);
      const float y = __shfl_sync(0xffffffffu, p[c / 8][2 + c % 2], from);
      const float* row = b + c * stride<D> + 2 * t;
#pragma unroll
      for (int d = 0; d < D / 8; ++d) {
        sums[d][0] = fmaf(x, row[8 * d], sums[d][0]);
        sums[d][1] = fmaf(x, row[8 * d + 1], sums[d][1]);
        sums[d][2] = fmaf(y, row[8 * d], sums[d][2]);
        sums[d][3] = fmaf(y, row[8 * d + 1], sums[d][3]);
      }
    }
  }
};

// The shared memory of a block: tiles that it holds, and tiles that it walks over.
template <typename Unit, int D>
struct Tiles {
  static constexpr int WARPS = Unit::template warps<D>, HELD = 16 * WARPS, WALKED = Unit::template walked<D>;
  static constexpr int LINE = Unit::template stride<D>, THREADS_OF = 32 * WARPS;
  static constexpr int bytes(int held, int walked, int numbers) {
    return (held * HELD + walked * WALKED) * LINE * static_cast<int>(sizeof(typename Unit::Element)) + numbers * 4;
  }
};

template <typename Unit, int D, typename T>
__global__ void attend(Attended<T> a, Headed<T> y, float* logs, int64_t tiles) {
  using Tile = Tiles<Unit, D>;
  constexpr int N = Tile::WALKED / 8;
  MBC_DYNAMIC_SHARED(shared);
  auto* q = reinterpret_cast<typename Unit::Element*>(shared);
  auto *k = q + Tile::HELD * Tile::LINE, *v = k + Tile::WALKED * Tile::LINE;
  const int64_t item = blockIdx.x / tiles, first = blockIdx.x % tiles * Tile::HELD;
  const Item at(item, a.heads, a.groups);
  const T* bias = a.scores.bias_of(at.h, at.g);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, own = threadIdx.x / 32 * 16;
  fetch<Unit, D>(q, a.q.of(at.n, at.h, at.g), a.q, first, a.scores.queries, a.depth, Tile::HELD);

  float most[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f}, sums[D / 8][4] = {};
  const int64_t end = a.scores.causal ? min(a.scores.keys, first + Tile::HELD) : a.scores.keys;
  for (int64_t key = 0; key < end; key += Tile::WALKED) {
    __syncthreads();
    fetch<Unit, D>(k, a.k.of(at.n, at.h, at.g), a.k, key, a.scores.keys, a.depth, Tile::WALKED);
    fetch<Unit, D>(v, a.v.of(at.n, at.h, at.g), a.v, key, a.scores.keys, a.depth, Tile::WALKED);
    Unit::arrive();
    __syncthreads();
    float p[N][4] = {};
    Unit::template dot<D, N>(p, q + own * Tile::LINE, k);
    float largest[2] = {most[0], most[1]};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t query = first + own + g + 8 * (e / 2), column = key + 8 * n + 2 * t + e % 2;
        const bool counts = a.scores.counts(query, column);
        p[n][e] = counts ? a.scores(bias, query, column, p[n][e]) : -INFINITY;
        largest[e / 2] = fmaxf(largest[e / 2], p[n][e]);
      }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      // Until a score counts, the running maximum may be any number but infinity.
      factor[i] = most[i] == -INFINITY ? 0.0f : exp2f(most[i] - largest[i]);
      most[i] = largest[i];
      total[i] *= factor[i];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[n][e] = p[n][e] == -INFINITY ? 0.0f : exp2f(p[n][e] - most[e / 2]);
        total[e / 2] += p[n][e];
      }
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[d][e] *= factor[e / 2];
    Unit::template mix<D, N>(sums, p, v);
  }
  T* to = y.of(at.n, at.h, at.g);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
    const int64_t query = first + own + g + 8 * i;
    if (query >= a.scores.queries) continue;
    if (t == 0) logs[item * a.scores.queries + query] = (most[i] + log2f(total[i])) * LN_2;
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t column = 8 * d + 2 * t + e;
        if (column < a.depth) to[query * y.position + column * y.channel] = from_float<T>(sums[d][2 * i + e] / total[i]);
      }
  }
}

// The sum of y * dy of every row of scores, which the gradient of softmax subtracts. `lanes` neighbouring threads, a
// power of two up to 32, share a row.
template <typename T>
__global__ void attention_dots(Headed<const T> y, Headed<const T> dy, float* dots, int64_t queries, int64_t heads,
                               int64_t groups, int64_t depth, int64_t count, int lanes) {
  const int lane = threadIdx.x % lanes;
  // All threads of a warp continue together.
  for (int64_t i = thread_index(); i - threadIdx.x % 32 < count * lanes; i += thread_count()) {
    const int64_t row = i / lanes;
    float sum = 0.0f;
    if (row < count) {
      const Item at(row / queries, heads, groups);
      const int64_t place = row % queries * y.position;
      const T *left = y.of(at.n, at.h, at.g) + place, *right = dy.of(at.n, at.h, at.g) + place;
      for (int64_t d = lane; d < depth; d += lanes)
        sum = fmaf(to_float(left[d * y.channel]), to_float(right[d * y.channel]), sum);
    }
    for (int far = 1; far < lanes; far *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
    if (lane == 0 && row < count) dots[row] = sum;
  }
}

// Turns scores into probabilities, and gradients of probabilities into those of scores. `across`: rows are keys.
template <bool ACROSS, int N, typename T>
__device__ void probabilities(float (&p)[N][4], const Scores<T>& scores, const T* bias, int64_t row, int64_t column,
                              const float* logs) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = g + 8 * (e / 2), c = 8 * n + 2 * t + e % 2;
      const int64_t query = ACROSS ? column + c : row + r, key = ACROSS ? row + r : column + c;
      p[n][e] = scores.counts(query, key)
                    ? exp2f(scores(bias, query, key, p[n][e]) - logs[ACROSS ? c : r] * LOG2_E)
                    : 0.0f;
    }
}
template <bool ACROSS, int N>
__device__ void score_gradients(float (&dp)[N][4], const float (&p)[N][4], const float* dots) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[n][e] = p[n][e] * (dp[n][e] - dots[ACROSS ? 8 * n + 2 * t + e % 2 : g + 8 * (e / 2)]);
}

// Copies logarithms and dots of `count` queries to shared memory.
__device__ inline void fetch_numbers(float* to, const float* logs, const float* dots, int64_t first, int64_t queries,
                                     int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const bool there = first + i < queries;
    to[i] = there ? logs[first + i] : 0.0f;
    to[count + i] = there ? dots[first + i] : 0.0f;
  }
}

template <int D, typename T>
__device__ void put_rows(const float (&sums)[D / 8][4], T* to, const Headed<T>& x, int64_t first, int64_t length,
                         int64_t depth, float factor) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int d = 0; d < D / 8; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t row = first + g + 8 * (e / 2), column = 8 * d + 2 * t + e % 2;
      if (row < length && column < depth)
        to[row * x.position + column * x.channel] = from_float<T>(sums[d][e] * factor);
    }
}

// Operands of the backward pass beside query, key and value: dy, and a logarithm and a dot for each query.
template <typename T>
struct Backward {
  Attended<T> a;
  Headed<const T> dy;
  const float *logs, *dots;
};

template <typename Unit, int D, typename T>
__global__ void attention_query_gradient(Backward<T> b, Headed<T> dq, int64_t tiles) {
  using Tile = Tiles<Unit, D>;
  constexpr int N = Tile::WALKED / 8;
  MBC_DYNAMIC_SHARED(shared);
  const auto& a = b.a;
  auto* q = reinterpret_cast<typename Unit::Element*>(shared);
  auto *dy = q + Tile::HELD * Tile::LINE, *k = dy + Tile::HELD * Tile::LINE, *v = k + Tile::WALKED * Tile::LINE;
  auto* numbers = reinterpret_cast<float*>(v + Tile::WALKED * Tile::LINE);
  const int64_t item = blockIdx.x / tiles, first = blockIdx.x % tiles * Tile::HELD, queries = a.scores.queries;
  const Item at(item, a.heads, a.groups);
  const T* bias = a.scores.bias_of(at.h, at.g);
  const int own = threadIdx.x / 32 * 16;
  fetch<Unit, D>(q, a.q.of(at.n, at.h, at.g), a.q, first, queries, a.depth, Tile::HELD);
  fetch<Unit, D>(dy, b.dy.of(at.n, at.h, at.g), b.dy, first, queries, a.depth, Tile::HELD);
  fetch_numbers(numbers, b.logs + item * queries, b.dots + item * queries, first, queries, Tile::HELD);

  float sums[D / 8][4] = {};
  const int64_t end = a.scores.causal ? min(a.scores.keys, first + Tile::HELD) : a.scores.keys;
  for (int64_t key = 0; key < end; key += Tile::WALKED) {
    __syncthreads();
    fetch<Unit, D>(k, a.k.of(at.n, at.h, at.g), a.k, key, a.scores.keys, a.depth, Tile::WALKED);
    fetch<Unit, D>(v, a.v.of(at.n, at.h, at.g), a.v, key, a.scores.keys, a.depth, Tile::WALKED);
    Unit::arrive();
    __syncthreads();
    float p[N][4] = {}, dp[N][4] = {};
    Unit::template dot<D, N>(p, q + own * Tile::LINE, k);
    Unit::template dot<D, N>(dp, dy + own * Tile::LINE, v);
    probabilities<false>(p, a.scores, bias, first + own, key, numbers + own);
    score_gradients<false>(dp, p, numbers + Tile::HELD + own);
    Unit::template mix<D, N>(sums, dp, k);
  }
  put_rows<D>(sums, dq.of(at.n, at.h, at.g), dq, first + own, queries, a.depth, a.scores.scale);
}

template <typename Unit, int D, typename T>
__global__ void attention_key_gradients(Backward<T> b, Headed<T> dk, Headed<T> dv, int64_t tiles) {
  using Tile = Tiles<Unit, D>;
  constexpr int N = Tile::WALKED / 8;
  MBC_DYNAMIC_SHARED(shared);
  const auto& a = b.a;
  auto* k = reinterpret_cast<typename Unit::Element*>(shared);
  auto *v = k + Tile::HELD * Tile::LINE, *q = v + Tile::HELD * Tile::LINE, *dy = q + Tile::WALKED * Tile::LINE;
  auto* numbers = reinterpret_cast<float*>(dy + Tile::WALKED * Tile::LINE);
  const int64_t item = blockIdx.x / tiles, first = blockIdx.x % tiles * Tile::HELD, queries = a.scores.queries;
  const Item at(item, a.heads, a.groups);
  const T* bias = a.scores.bias_of(at.h, at.g);
  const int own = threadIdx.x / 32 * 16;
  fetch<Unit, D>(k, a.k.of(at.n, at.h, at.g), a.k, first, a.scores.keys, a.depth, Tile::HELD);
  fetch<Unit, D>(v, a.v.of(at.n, at.h, at.g), a.v, first, a.scores.keys, a.depth, Tile::HELD);

  float keys[D / 8][4] = {}, values[D / 8][4] = {};
  const int64_t start = a.scores.causal ? first / Tile::WALKED * Tile::WALKED : 0;
  for (int64_t query = start; query < queries; query += Tile::WALKED) {
    __syncthreads();
    fetch<Unit, D>(q, a.q.of(at.n, at.h, at.g), a.q, query, queries, a.depth, Tile::WALKED);
    fetch<Unit, D>(dy, b.dy.of(at.n, at.h, at.g), b.dy, query, queries, a.depth, Tile::WALKED);
    fetch_numbers(numbers, b.logs + item * queries, b.dots + item * queries, query, queries, Tile::WALKED);
    Unit::arrive();
    __syncthreads();
    float p[N][4] = {}, dp[N][4] = {};
    Unit::template dot<D, N>(p, k + own * Tile::LINE, q);
    probabilities<true>(p, a.scores, bias, first + own, query, numbers);
    Unit::template mix<D, N>(values, p, dy);
    Unit::template dot<D, N>(dp, v + own * Tile::LINE, dy);
    score_gradients<true>(dp, p, numbers + Tile::WALKED);
    Unit::template mix<D, N>(keys, dp, q);
  }
  put_rows<D>(keys, dk.of(at.n, at.h, at.g), dk, first + own, a.scores.keys, a.depth, a.scores.scale);
  put_rows<D>(values, dv.of(at.n, at.h, at.g), dv, first + own, a.scores.keys, a.depth, 1.0f);
}

// One tile of the bias's gradient, summed over one part of the samples, heads and groups that share the bias.
template <typename Unit, int D, typename T>
__global__ void attention_bias_gradient(Backward<T> b, float* partial, int64_t bias_heads, int64_t bias_groups,
                                        int64_t parts) {
  using Tile = Tiles<Unit, D>;
  constexpr int N = Tile::WALKED / 8;
  MBC_DYNAMIC_SHARED(shared);
  const auto& a = b.a;
  auto* q = reinterpret_cast<typename Unit::Element*>(shared);
  auto *dy = q + Tile::HELD * Tile::LINE, *k = dy + Tile::HELD * Tile::LINE, *v = k + Tile::WALKED * Tile::LINE;
  auto* numbers = reinterpret_cast<float*>(v + Tile::WALKED * Tile::LINE);
  const int64_t queries = a.scores.queries, all_keys = a.scores.keys;
  const int64_t down = (queries + Tile::HELD - 1) / Tile::HELD, across = (all_keys + Tile::WALKED - 1) / Tile::WALKED;
  int64_t block = blockIdx.x;
  const int64_t key = block % across * Tile::WALKED;
  block /= across;
  const int64_t first = block % down * Tile::HELD;
  block /= down;
  const int64_t plane = block % (bias_heads * bias_groups), part = block / (bias_heads * bias_groups);
  // Heads and groups that share this bias: one if each has its own bias, otherwise all of them.
  const int64_t heads = bias_heads > 1 ? 1 : a.heads, groups = bias_groups > 1 ? 1 : a.groups;
  const int64_t count = a.rows * heads * groups;
  const int own = threadIdx.x / 32 * 16;

  float sums[N][4] = {};
  for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
    Item at(i, heads, groups);
    if (bias_heads > 1) at.h = plane / bias_groups;
    if (bias_groups > 1) at.g = plane % bias_groups;
    const int64_t item = (at.n * a.heads + at.h) * a.groups + at.g;
    __syncthreads();
    fetch<Unit, D>(q, a.q.of(at.n, at.h, at.g), a.q, first, queries, a.depth, Tile::HELD);
    fetch<Unit, D>(dy, b.dy.of(at.n, at.h, at.g), b.dy, first, queries, a.depth, Tile::HELD);
    fetch<Unit, D>(k, a.k.of(at.n, at.h, at.g), a.k, key, all_keys, a.depth, Tile::WALKED);
    fetch<Unit, D>(v, a.v.of(at.n, at.h, at.g), a.v, key, all_keys, a.depth, Tile::WALKED);
    fetch_numbers(numbers, b.logs + item * queries, b.dots + item * queries, first, queries, Tile::HELD);
    Unit::arrive();
    __syncthreads();
    float p[N][4] = {}, dp[N][4] = {};
    Unit::template dot<D, N>(p, q + own * Tile::LINE, k);
    Unit::template dot<D, N>(dp, dy + own * Tile::LINE, v);
    probabilities<false>(p, a.scores, a.scores.bias_of(at.h, at.g), first + own, key, numbers + own);
    score_gradients<false>(dp, p, numbers + Tile::HELD + own);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] += dp[n][e];
  }
  float* to = partial + (part * bias_heads * bias_groups + plane) * queries * all_keys;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t query = first + own + g + 8 * (e / 2), column = key + 8 * n + 2 * t + e % 2;
      if (query < queries && column < all_keys) to[query * all_keys + column] = sums[n][e];
    }
}

template <typename Unit, typename T, int D, typename O>
void run_attend(const MbcCall& call, const AttentionArguments& a, const O& at) {
  using Tile = Tiles<Unit, D>;
  const Attended<T> of(call, a, at);
  const Headed<T> y(at.y, a, a.queries, 0, 1);
  const int64_t tiles = divide_up(a.queries, Tile::HELD);
  MBC_LAUNCH_SHARED((attend<Unit, D, T>), static_cast<unsigned>(tiles * of.items()), Tile::THREADS_OF,
                    Tile::bytes(1, 2, 0), call.stream, of, y, at.logs.template as<float>(), tiles);
}

// `dots`: where the dots of all queries are written.
template <typename T, typename O>
Backward<T> backward_of(const MbcCall& call, const AttentionArguments& a, const O& at, float* dots) {
  const Headed<const T> y(at.y, a, a.queries, 0, 1), dy(at.dy, a, a.queries, 0, 1);
  const int64_t count = a.rows * a.heads * a.groups * a.queries;
  const int lanes = y.channel == 1 ? 8 : 1;  // if channels are adjacent
  MBC_LAUNCH((attention_dots<T>), blocks_for(count * lanes), THREADS, call.stream, y, dy, dots, a.queries, a.heads,
             a.groups, a.depth, count, lanes);
  return {Attended<T>(call, a, at), dy, at.logs, dots};
}

// The gradients of queries (0), keys (1) and values (2).
template <typename T, typename O>
Headed<T> gradient_of(const AttentionArguments& a, const O& at, int i) {
  const Operand of = a.packed || i == 0 ? at.dq : i == 1 ? at.dk : at.dv;
  return {of, a, i == 0 ? a.queries : a.keys, a.packed ? i : 0, a.packed ? 3 : 1};
}

template <typename Unit, typename T, int D, typename O>
void run_backward(const MbcCall& call, const AttentionArguments& a, const O& at) {
  using Tile = Tiles<Unit, D>;
  const Backward<T> b = backward_of<T>(call, a, at, at.dots);
  int64_t tiles = divide_up(a.queries, Tile::HELD);
  MBC_LAUNCH_SHARED((attention_query_gradient<Unit, D, T>), static_cast<unsigned>(tiles * b.a.items()),
                    Tile::THREADS_OF, Tile::bytes(2, 2, 2 * Tile::HELD), call.stream, b, gradient_of<T>(a, at, 0), tiles);
  tiles = divide_up(a.keys, Tile::HELD);
  MBC_LAUNCH_SHARED((attention_key_gradients<Unit, D, T>), static_cast<unsigned>(tiles * b.a.items()),
                    Tile::THREADS_OF, Tile::bytes(2, 2, 2 * Tile::WALKED), call.stream, b, gradient_of<T>(a, at, 1),
                    gradient_of<T>(a, at, 2), tiles);
}

template <typename Unit, typename T, int D, typename O>
void run_bias_gradient(const MbcCall& call, const AttentionBiasArguments& a, const O& at) {
  using Tile = Tiles<Unit, D>;
  float *dbias = at.dbias, *partial = at.partial;
  const int64_t elements = a.bias_heads * a.bias_groups * a.queries * a.keys;
  const Backward<T> b = backward_of<T>(call, a, at, partial + a.parts * elements);
  const int64_t tiles = divide_up(a.queries, Tile::HELD) * divide_up(a.keys, Tile::WALKED);
  MBC_LAUNCH_SHARED((attention_bias_gradient<Unit, D, T>),
                    static_cast<unsigned>(tiles * a.bias_heads * a.bias_groups * a.parts), Tile::THREADS_OF,
                    Tile::bytes(2, 2, 2 * Tile::HELD), call.stream, b, partial, a.bias_heads, a.bias_groups, a.parts);
  add_parts(call.stream, partial, dbias, elements, a.parts, a.accumulate != 0);
}

// Calls `run` with the smallest number of channels that kernels are compiled for and that is large enough.
template <int MOST, typename Run>
void for_depth(int64_t depth, const Run& run) {
  if (depth <= 32) return run(std::integral_constant<int, 32>());
  if (depth <= 64) return run(std::integral_constant<int, 64>());
  if (depth <= 96) return run(std::integral_constant<int, 96>());
  if (depth <= 128) return run(std::integral_constant<int, 128>());
  if constexpr (MOST > 128) return run(std::integral_constant<int, 256>());
}

}  // namespace mbc
