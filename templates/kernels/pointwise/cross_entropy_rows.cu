// Softmax cross entropy of many classes at few rows (classification), and its gradient: a block takes a row.
//
// Bytes      logits in once, the gradient out once.
// Threads    256, each of which keeps up to 16 logits of a row in registers, all in flight at once; with one warp for
//            each row, a thousand classes would take thirty waits for memory.
// Shared     one softmax state for each warp.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      latency: there are few rows.
#include "mbc_control.h"
#include "loss.cuh"

namespace mbc {

constexpr int ROW_WARPS = THREADS / 32;

// K classes for each thread, THREADS apart.
template <typename T, int K>
struct Row {
  float logits[K];

  __device__ Row(const T* row, int64_t classes) {
#pragma unroll
    for (int k = 0; k < K; ++k) logits[k] = at(k) < classes ? to_float(row[at(k)]) : -INFINITY;
  }
  __device__ static int64_t at(int k) { return static_cast<int64_t>(threadIdx.x) + k * THREADS; }

  // Run by all threads of the block; no thread may still be reading `shared`.
  __device__ Softmax softmax(int64_t classes, Softmax (&shared)[ROW_WARPS]) const {
    const unsigned warp = threadIdx.x / 32;
    Softmax s{-INFINITY, INT64_MAX, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (logits[k] > s.greatest) s.greatest = logits[k], s.best = at(k);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float v = __shfl_xor_sync(0xffffffffu, s.greatest, step);
      const long long best = __shfl_xor_sync(0xffffffffu, static_cast<long long>(s.best), step);
      if (v > s.greatest || (v == s.greatest && best < s.best)) s.greatest = v, s.best = best;
    }
    if (threadIdx.x % 32 == 0) shared[warp] = s;
    __syncthreads();
    s = shared[0];
#pragma unroll
    for (int w = 1; w < ROW_WARPS; ++w) {
      const Softmax& other = shared[w];
      if (other.greatest > s.greatest || (other.greatest == s.greatest && other.best < s.best)) s = other;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (at(k) >= classes) continue;
      const float v = logits[k] - s.greatest;
      if (at(k) != s.best) s.others += expf(v);
      s.sum += v;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      s.others += __shfl_xor_sync(0xffffffffu, s.others, step);
      s.sum += __shfl_xor_sync(0xffffffffu, s.sum, step);
    }
    __syncthreads();  // all threads have read the maxima
    if (threadIdx.x % 32 == 0) shared[warp] = s;
    __syncthreads();
    s.others = s.sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ROW_WARPS; ++w) {
      s.others += shared[w].others;
      s.sum += shared[w].sum;
    }
    return s;
  }
};

template <typename T, int K>
__global__ void cross_entropy_rows(const T* logits, const int32_t* target, Score* partial, float* loss, float* correct,
                                   int64_t rows, int64_t classes, float smoothing) {
  __shared__ Softmax shared[ROW_WARPS];
  Score score{0.0, 0.0};
  for (int64_t p = blockIdx.x; p < rows; p += gridDim.x) {
    const int64_t t = target[p];
    const bool valid = t >= 0 && t < classes;
    const float own = valid ? to_float(logits[p * classes + t]) : 0.0f;
    const Softmax s = Row<T, K>(logits + p * classes, classes).softmax(classes, shared);
    __syncthreads();  // the shared values have been read
    if (threadIdx.x != 0) continue;
    score.loss += valid ? s.loss(own, classes, smoothing) : NAN;  // `guard` then skips this step
    if (s.best == t) score.correct += 1.0;
  }
  store_score(score, partial, loss, correct, static_cast<double>(rows));
}

template <typename T, int K>
__global__ void cross_entropy_rows_backward(const T* logits, const int32_t* target, const MbcControl* control,
                                            T* dlogits, int64_t rows, int64_t classes, float smoothing, double weight) {
  __shared__ Softmax shared[ROW_WARPS];
  const int64_t p = blockIdx.x, t = target[p];
  const float scale = control->loss_scale, even = smoothing / static_cast<float>(classes);
  const Row<T, K> row(logits + p * classes, classes);
  const float factor = static_cast<float>(weight * static_cast<double>(scale) / static_cast<double>(rows));
  const Softmax s = row.softmax(classes, shared);
  const bool valid = t >= 0 && t < classes;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int64_t c = row.at(k);
    if (c >= classes) continue;
    const float gradient = s.gradient(row.logits[k], c, t, smoothing, even);
    dlogits[p * classes + c] = from_float<T>(valid ? gradient * factor : 0.0f);
  }
}

// Calls `run` with the number of classes of a thread as a constant; returns false if they are too many.
template <typename Run>
bool for_classes(int64_t classes, Run run) {
  if (classes <= THREADS)
    run(std::integral_constant<int, 1>());
  else if (classes <= 4 * THREADS)
    run(std::integral_constant<int, 4>());
  else if (classes <= 16 * THREADS)
    run(std::integral_constant<int, 16>());
  else
    return false;
  return true;
}

constexpr const char* TOO_MANY_CLASSES = "a block cannot hold this number of classes";

}  // namespace mbc

extern "C" const char* mbc_softmax_cross_entropy_rows(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const auto* target = in<int32_t>(call, 1);
  float *loss = out<float>(call, 2), *correct = out<float>(call, 3);
  Score* partial = a.parts > 1 ? out<Score>(call, 4) : nullptr;
  const float smoothing = static_cast<float>(call.reals[0]);
  MBC_FOR_TYPE(a.type, T, {
    const bool done = for_classes(a.channels, [&](auto k) {
      MBC_LAUNCH((cross_entropy_rows<T, decltype(k)::value>), static_cast<unsigned>(a.parts), THREADS, call.stream,
                 in<T>(call, 0), target, partial, loss, correct, a.rows, a.channels, smoothing);
    });
    if (!done) return TOO_MANY_CLASSES;
  });
  merge(partial, a.parts, loss, correct, a.rows, call.stream);
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_rows_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const bool done = for_classes(a.channels, [&](auto k) {
      MBC_LAUNCH((cross_entropy_rows_backward<T, decltype(k)::value>), static_cast<unsigned>(a.rows), THREADS,
                 call.stream, in<T>(call, 0), in<int32_t>(call, 1), in<MbcControl>(call, 2), out<T>(call, 3), a.rows,
                 a.channels, static_cast<float>(call.reals[0]), call.reals[1]);
    });
    if (!done) return TOO_MANY_CLASSES;
  });
  return launched();
}
