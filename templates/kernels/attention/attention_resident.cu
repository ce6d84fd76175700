// Scaled dot-product attention of short sequences in 16 bits on tensor cores, channels last: a block has a whole head
// in shared memory (ViT at 224 pixels has 197 positions, a window of Swin 49).
//
// GEMM       as in attention_mma.cu, but five products backward instead of seven: a warp has 16 keys and computes their
//            scores for all queries. It leaves the gradients of scores, rounded to 16 bits for tensor cores, in
//            shared memory. After one barrier it has 16 queries, and multiplies the gradients of all warps by the keys.
//            No two warps add to one element.
// Tile       16 rows a warp. Forward: up to 8 warps walk over the queries, 48 keys at a time (32 with <= 32 channels).
//            Backward: one warp for every 16 keys, 16 queries at a time. Sequences are padded to multiples of 16.
// Shared     forward: keys and values. Backward: keys, queries, dy and the gradients of scores. For 197 positions of 64
//            channels 59,904 and 178,048 bytes. Rows are padded by 16 bytes, so that ldmatrix has no bank conflicts.
// Registers  128 for 64 channels; 80 forward and 96 backward for 32. The operand that a warp keeps comes directly from
//            global memory, as fragments; the sums are those of 16 rows, backward of keys and values.
// Limit      reading shared memory, 4 cycles for two mma.sync; backward one block fits a multiprocessor, and nothing
//            hides its loads.
#include "attention.cuh"
#include "mma.cuh"
#include "attention_resident_operands.h"

namespace mbc {

constexpr int TILE = 16;          // positions
constexpr int FORWARD_WARPS = 8;  // most warps of a block
template <int D>
constexpr int AHEAD = D <= 32 ? 2 : 3;  // tiles of keys whose scores a warp computes together
template <int D>
constexpr int FORWARD_BLOCKS = D <= 32 ? 3 : 2;  // blocks that fit into the registers of a multiprocessor
template <int D>
constexpr int BACKWARD_WARPS = D <= 32 ? 20 : 16;  // most warps of a block, for the same reason
// Elements between rows in shared memory: 16 bytes more than a row has.
template <int COUNT>
constexpr int PITCH = COUNT + 8;

inline int padded(int64_t length) { return static_cast<int>(divide_up(length, TILE)) * TILE; }

// 2 to the power of x, to 2 units in the last place; ex2.approx.
__device__ inline float power_of_2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Which scores of a head count, and the bias that is added to them, in powers of two. `PLAIN`: there is no bias, and
// every key counts for every query.
template <bool PLAIN, typename T>
struct HeadScores {
  const T* bias;
  int queries, keys;
  bool causal;
  float scale;

  __device__ HeadScores(const Scores<T>& s, const ItemAt<uint32_t>& at)
      : bias(s.bias_of(at.h, at.g)), queries(static_cast<int>(s.queries)), keys(static_cast<int>(s.keys)),
        causal(s.causal), scale(s.scale * LOG2_E) {}

  __device__ float operator()(int query, int key, float score) const {
    if constexpr (PLAIN) return key < keys ? score : -INFINITY;
    if (query >= queries || key >= keys || (causal && key > query)) return -INFINITY;
    compiler_fence();  // loading all elements of a bias at once would need too many registers
    return bias == nullptr ? score : fmaf(to_float(bias[query * keys + key]), LOG2_E, score);
  }
};

// Copies `count` positions to shared memory; zeros from `length` and from `depth` on.
template <int D, int P, typename T>
__device__ void copy_rows(T* to, const T* from, int64_t position, int length, int depth, int count) {
  constexpr int COLUMNS = D / 8;
  for (int i = threadIdx.x; i < count * COLUMNS; i += blockDim.x) {
    const int row = i / COLUMNS, column = i % COLUMNS * 8;
    const bool there = row < length && column < depth;
    cp_async_16(reinterpret_cast<uint4*>(to + row * P + column), there ? from + row * position + column : from,
                there);
  }
}

// Loads a warp's 16 rows from global memory, as the first operand of products over their channels.
template <int D, typename T>
__device__ void load_rows(uint32_t (&a)[D / 16][4], const T* from, int64_t position, int first, int length, int depth) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int row = first + g + 8 * (w % 2), column = 16 * k + 8 * (w / 2) + 2 * t;
      a[k][w] = row < length && column < depth ? *reinterpret_cast<const uint32_t*>(from + row * position + column) : 0;
    }
}

// sums += A B^T, of 16 rows of D elements in registers and N tiles of rows, P apart, in shared memory. Neighbouring
// MMAs add to different sums.
template <int D, int P, int N, typename T>
__device__ void dot(float (&sums)[N][2][4], const uint32_t (&a)[D / 16][4], const T* b) {
  const int lane = threadIdx.x % 32;
  const T* row = b + (lane / 16 * 8 + lane % 8) * P + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t right[4];
      ldmatrix_x4(right, reinterpret_cast<const uint4*>(row + TILE * n * P + 16 * k));
      mma_m16n8k16<T>(sums[n][0], a[k], right[0], right[1]);
      mma_m16n8k16<T>(sums[n][1], a[k], right[2], right[3]);
    }
}

// sums += P B, of 16 x 16 elements in registers and 16 rows of D in shared memory.
template <int D, int P, typename T>
__device__ void mix(float (&sums)[D / 8][4], const uint32_t (&p)[4], const T* b) {
  const int lane = threadIdx.x % 32;
  const T* row = b + (lane / 8 % 2 * 8 + lane % 8) * P + lane / 16 * 8;
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    uint32_t right[4];
    ldmatrix_x4_trans(right, reinterpret_cast<const uint4*>(row + d));
    mma_m16n8k16<T>(sums[d / 8], p, right[0], right[1]);
    mma_m16n8k16<T>(sums[d / 8 + 1], p, right[2], right[3]);
  }
}

// 16 x 16 results in the form of the first operand of the next product.
template <typename T>
__device__ void round_words(uint32_t (&a)[4], const float (&p)[2][4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) a[w] = rounded_word<T>(p[w / 2] + 2 * (w % 2));
}

// Stores 16 rows, each multiplied by a factor. Neighbours exchange words, so that a warp writes whole sectors of 32
// bytes.
template <int D, typename T>
__device__ void store_rows(const float (&sums)[D / 8][4], T* to, int64_t position, int first, int length, int depth,
                           float upper, float lower) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool odd = t % 2 != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + g + 8 * i;
    const float factor = i == 0 ? upper : lower;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      uint32_t words[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float pair[2] = {sums[d / 8 + n][2 * i] * factor, sums[d / 8 + n][2 * i + 1] * factor};
        words[n] = rounded_word<T>(pair);
      }
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
      const int column = d + 8 * odd + 4 * (t / 2);
      if (row < length && column < depth)
        *reinterpret_cast<uint2*>(to + row * position + column) = odd ? uint2{other, words[1]} : uint2{words[0], other};
    }
  }
}

// State of 16 queries: the largest score so far, and the sums relative to that score.
template <int D>
struct Attending {
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f}, sums[D / 8][4] = {};

  // Adds N more tiles of keys, from `key` on. `AS_THEY_ARE`: all of them count, and there is no bias.
  template <int N, bool AS_THEY_ARE, bool PLAIN, typename T>
  __device__ void attend(const uint32_t (&q)[D / 16][4], const T* k, const T* v, const HeadScores<PLAIN, T>& scores,
                         int query, int key) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[N][2][4] = {};
    dot<D, PITCH<D>>(p, q, k + key * PITCH<D>);
    float largest[2] = {most[0], most[1]}, factor[2], from[2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = p[n][e / 4][e % 4];
        score *= scores.scale;
        if constexpr (!AS_THEY_ARE)
          score = scores(query + g + 8 * (e % 4 / 2), key + TILE * n + 8 * (e / 4) + 2 * t + e % 2, score);
        largest[e % 4 / 2] = fmaxf(largest[e % 4 / 2], score);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      // Until a score counts, the running maximum may be any number but infinity.
      from[i] = largest[i] == -INFINITY ? 0.0f : largest[i];
      factor[i] = power_of_2(most[i] - from[i]);
      most[i] = largest[i];
      total[i] *= factor[i];
    }
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[d][e] *= factor[e / 2];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& share = p[n][e / 4][e % 4];
        share = power_of_2(share - from[e % 4 / 2]);
        total[e % 4 / 2] += share;
      }
      uint32_t words[4];
      round_words<T>(words, p[n]);
      mix<D, PITCH<D>>(sums, words, v + (key + TILE * n) * PITCH<D>);
    }
  }
};

template <int D, bool PLAIN, typename T>
__global__ void __launch_bounds__(32 * FORWARD_WARPS, FORWARD_BLOCKS<D>)
    attend_resident(Attended<T> a, Headed<T> y, float* logs, int all_queries, int all_keys) {
  MBC_DYNAMIC_SHARED(shared);
  T *k = reinterpret_cast<T*>(shared), *v = k + all_keys * PITCH<D>;
  const ItemAt<uint32_t> at(blockIdx.x, static_cast<uint32_t>(a.heads), static_cast<uint32_t>(a.groups));
  const HeadScores<PLAIN, T> scores(a.scores, at);
  const int depth = static_cast<int>(a.depth);
  copy_rows<D, PITCH<D>>(k, a.k.of(at.n, at.h, at.g), a.k.position, scores.keys, depth, all_keys);
  copy_rows<D, PITCH<D>>(v, a.v.of(at.n, at.h, at.g), a.v.position, scores.keys, depth, all_keys);
  cp_async_commit();
  const T* from = a.q.of(at.n, at.h, at.g);
  int query = threadIdx.x / 32 * TILE;
  uint32_t q[D / 16][4];
  load_rows<D>(q, from, a.q.position, query, scores.queries, depth);
  cp_async_wait<0>();
  __syncthreads();

  T* to = y.of(at.n, at.h, at.g);
  float* log = logs + static_cast<int64_t>(blockIdx.x) * scores.queries;
  while (query < all_queries) {
    constexpr int STEP = AHEAD<D> * TILE;
    Attending<D> of;
    const int end = scores.causal ? min(all_keys, query + TILE) : all_keys;
    int key = 0;
    for (; key + STEP <= min(end, scores.keys); key += STEP)
      of.template attend<STEP / TILE, PLAIN>(q, k, v, scores, query, key);
    for (; key < end; key += TILE) of.template attend<1, false>(q, k, v, scores, query, key);
    const int next = query + static_cast<int>(blockDim.x / 32) * TILE;
    if (next < all_queries) load_rows<D>(q, from, a.q.position, next, scores.queries, depth);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of.total[i] += __shfl_xor_sync(0xffffffffu, of.total[i], 1);
      of.total[i] += __shfl_xor_sync(0xffffffffu, of.total[i], 2);
      const int row = query + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
      if (threadIdx.x % 4 == 0 && row < scores.queries) log[row] = (of.most[i] + log2f(of.total[i])) * LN_2;
    }
    store_rows<D>(of.sums, to, y.position, query, scores.queries, depth, 1.0f / of.total[0], 1.0f / of.total[1]);
    query = next;
  }
}

// Two numbers of a query: the logarithm to base 2 of its sum of exponentials, infinite beyond the last query so that no
// key has a share in it, and the sum of y * dy.
struct alignas(8) QueryNumbers {
  float log, dot;
};

// Copies dy, and stores the numbers of each query.
template <int D, int P, typename T>
__device__ void copy_gradient(T* to, QueryNumbers* numbers, const T* dy, const T* y, const float* logs,
                              int64_t position, int length, int depth, int count) {
  constexpr int COLUMNS = D / 8;  // threads that share a row, a power of two
  static_assert((COLUMNS & (COLUMNS - 1)) == 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < count * COLUMNS; i += blockDim.x) {
    const int row = i / COLUMNS, column = i % COLUMNS * 8;
    Vec<T, 8> left{}, right{};
    if (row < length && column < depth) {
      left = load<8>(dy + row * position + column);
      right = load<8>(y + row * position + column);
    }
    store(to + row * P + column, left);
    float dot = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) dot = fmaf(to_float(left.v[e]), to_float(right.v[e]), dot);
#pragma unroll
    for (int far = 1; far < COLUMNS; far *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, far);
    if (column == 0) numbers[row] = {row < length ? logs[row] * LOG2_E : INFINITY, dot};
  }
}

template <typename T>
struct BackwardTensors {
  Attended<T> a;
  Headed<const T> y, dy;
  const float* logs;
  Headed<T> dq, dk, dv;
};

template <int D, bool PLAIN, typename T>
__global__ void __launch_bounds__(32 * BACKWARD_WARPS<D>, 1)
    attend_resident_backward(BackwardTensors<T> b, int all_queries, int all_keys) {
  MBC_DYNAMIC_SHARED(shared);
  constexpr int P = PITCH<D>, PAIR = PITCH<2 * D>;
  const auto& a = b.a;
  const int pitch = all_queries + 8;
  // Keys; queries, followed by dy; the gradients of scores, [key, query]; numbers of queries.
  T *k = reinterpret_cast<T*>(shared), *q = k + all_keys * P, *dy = q + D, *dscores = q + all_queries * PAIR;
  auto* numbers = reinterpret_cast<QueryNumbers*>(dscores + all_keys * pitch);
  const ItemAt<uint32_t> at(blockIdx.x, static_cast<uint32_t>(a.heads), static_cast<uint32_t>(a.groups));
  const HeadScores<PLAIN, T> scores(a.scores, at);
  const int depth = static_cast<int>(a.depth), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = threadIdx.x / 32 * TILE;
  copy_rows<D, P>(k, a.k.of(at.n, at.h, at.g), a.k.position, scores.keys, depth, all_keys);
  copy_rows<D, PAIR>(q, a.q.of(at.n, at.h, at.g), a.q.position, scores.queries, depth, all_queries);
  cp_async_commit();
  copy_gradient<D, PAIR>(dy, numbers, b.dy.of(at.n, at.h, at.g), b.y.of(at.n, at.h, at.g),
                         b.logs + static_cast<int64_t>(blockIdx.x) * scores.queries, b.dy.position, scores.queries,
                         depth, all_queries);
  uint32_t value[D / 16][4];
  load_rows<D>(value, a.v.of(at.n, at.h, at.g), a.v.position, own, scores.keys, depth);
  cp_async_wait<0>();
  __syncthreads();

  {
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    for (int query = scores.causal ? own : 0; query < all_queries; query += TILE) {
      float p[1][2][4] = {}, dp[1][2][4] = {};
      // Registers have room for one of the two operands.
      uint32_t key[D / 16][4];
#pragma unroll
      for (int i = 0; i < D / 16; ++i)
        ldmatrix_x4(key[i], reinterpret_cast<const uint4*>(k + (own + lane % 16) * P + lane / 16 * 8 + 16 * i));
      dot<D, PAIR>(dp, value, dy + query * PAIR);
      dot<D, PAIR>(p, key, q + query * PAIR);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = query + 8 * n + 2 * t;
        const auto pair = load<2>(numbers + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &share = p[0][n][e], &gradient = dp[0][n][e];
          const float power = fmaf(share, scores.scale, -pair.v[e % 2].log);
          share = power_of_2(scores(column + e % 2, own + g + 8 * (e / 2), power));
          gradient = share * (gradient - pair.v[e % 2].dot);
        }
      }
      uint32_t words[4];
      round_words<T>(words, p[0]);
      mix<D, PAIR>(dv, words, dy + query * PAIR);
      round_words<T>(words, dp[0]);
      mix<D, PAIR>(dk, words, q + query * PAIR);
#pragma unroll
      for (int w = 0; w < 4; ++w)
        *reinterpret_cast<uint32_t*>(dscores + (own + g + 8 * (w % 2)) * pitch + query + 8 * (w / 2) + 2 * t) =
            words[w];
    }
    store_rows<D>(dk, b.dk.of(at.n, at.h, at.g), b.dk.position, own, scores.keys, depth, a.scores.scale,
                  a.scores.scale);
    store_rows<D>(dv, b.dv.of(at.n, at.h, at.g), b.dv.position, own, scores.keys, depth, 1.0f, 1.0f);
  }
  __syncthreads();

  for (int query = own; query < all_queries; query += static_cast<int>(blockDim.x / 32) * TILE) {
    float dq[D / 8][4] = {};
    const int end = scores.causal ? min(all_keys, query + TILE) : all_keys;
    const T* row = dscores + (lane / 16 * 8 + lane % 8) * pitch + query + lane / 8 % 2 * 8;
    for (int i = 0; i < end; i += TILE) {
      uint32_t words[4];
      ldmatrix_x4_trans(words, reinterpret_cast<const uint4*>(row + i * pitch));
      mix<D, P>(dq, words, k + i * P);
    }
    store_rows<D>(dq, b.dq.of(at.n, at.h, at.g), b.dq.position, query, scores.queries, depth, a.scores.scale,
                  a.scores.scale);
  }
}

template <typename T, int D, bool PLAIN>
void run_attend_resident(const MbcCall& call, const AttentionArguments& a) {
  const auto at = operands_of_attention_resident(call);
  const Attended<T> of(call, a, at);
  const int queries = padded(a.queries), keys = padded(a.keys);
  const Headed<T> y(at.y, a, a.queries, 0, 1);
  // The fewest warps that do not need more rounds.
  const int64_t tiles = queries / TILE, warps = divide_up(tiles, divide_up(tiles, FORWARD_WARPS));
  MBC_LAUNCH_SHARED((attend_resident<D, PLAIN, T>), static_cast<unsigned>(of.items()),
                    static_cast<unsigned>(32 * warps), 2 * keys * PITCH<D> * 2, call.stream, of, y,
                    at.logs.as<float>(), queries, keys);
}

template <typename T, int D, bool PLAIN>
void run_attend_resident_backward(const MbcCall& call, const AttentionArguments& a) {
  const auto at = operands_of_attention_resident_backward(call);
  const int queries = padded(a.queries), keys = padded(a.keys);
  const BackwardTensors<T> b{Attended<T>(call, a, at),
                             Headed<const T>(at.y, a, a.queries, 0, 1),
                             Headed<const T>(at.dy, a, a.queries, 0, 1),
                             at.logs,
                             gradient_of<T>(a, at, 0),
                             gradient_of<T>(a, at, 1),
                             gradient_of<T>(a, at, 2)};
  const int bytes = (keys * (PITCH<D> + queries + 8) + queries * PITCH<2 * D>) * 2 + 8 * queries;
  MBC_LAUNCH_SHARED((attend_resident_backward<D, PLAIN, T>), static_cast<unsigned>(b.a.items()),
                    static_cast<unsigned>(keys / TILE * 32), bytes, call.stream, b, queries, keys);
}

// Calls `run` with the compiled number of channels, and whether all scores count without a bias.
template <typename Run>
void for_scores(const AttentionArguments& a, const Run& run) {
  const auto of_depth = [&](auto plain) {
    a.depth <= 32 ? run(std::integral_constant<int, 32>(), plain) : run(std::integral_constant<int, 64>(), plain);
  };
  a.bias_heads == 0 && a.causal == 0 ? of_depth(std::true_type()) : of_depth(std::false_type());
}

}  // namespace mbc

extern "C" const char* mbc_attention_resident(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<AttentionArguments>(call, [&](auto of) {
    const auto& a = arguments<AttentionArguments>(call);
    for_scores(a, [&](auto depth, auto plain) { run_attend_resident<decltype(of), depth(), plain()>(call, a); });
  });
}

extern "C" const char* mbc_attention_resident_backward(const MbcCall& call) {
  using namespace mbc;
  return on_tensor_cores<AttentionArguments>(call, [&](auto of) {
    const auto& a = arguments<AttentionArguments>(call);
    for_scores(a, [&](auto depth, auto plain) {
      run_attend_resident_backward<decltype(of), depth(), plain()>(call, a);
    });
  });
}
