// Losses, their gradients and their weighted sum. A loss is summed in fp64 in two stages of fixed order: `parts` blocks
// leave a sum each, then one block adds them; with one part the first stage finishes by itself.
#include "mbc_control.h"
#include "mbc_device.cuh"

struct CrossEntropyArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t classes;
  int64_t inner;
  int64_t parts;
};

struct CrossEntropyBackwardArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t classes;
  int64_t inner;
};

struct MseArguments {
  int64_t type;
  int64_t elements;
  int64_t parts;
};

struct MseBackwardArguments {
  int64_t type;
  int64_t elements;
};

struct WeightedSumArguments {
  int64_t inputs;
};

namespace mbc {

struct Score {
  double loss, correct;
};

// Sums the scores of a block's threads in a fixed order; thread 0 gets the sum.
__device__ inline Score sum_block(Score score) {
  __shared__ Score shared[THREADS];
  const unsigned t = threadIdx.y * blockDim.x + threadIdx.x;
  shared[t] = score;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) {
      shared[t].loss += shared[t + half].loss;
      shared[t].correct += shared[t + half].correct;
    }
  }
  return shared[0];
}

__device__ inline void leave(Score score, Score* partial, float* loss, float* correct, double count) {
  score = sum_block(score);
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  if (gridDim.x == 1) {
    loss[0] = static_cast<float>(score.loss / count);
    if (correct != nullptr) correct[0] = static_cast<float>(score.correct);
  } else {
    partial[blockIdx.x] = score;
  }
}

__global__ void merge_scores(const Score* partial, int64_t parts, float* loss, float* correct, double count) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) {
    score.loss += partial[i].loss;
    score.correct += partial[i].correct;
  }
  leave(score, nullptr, loss, correct, count);
}

// What all classes of one position give: the greatest logit and its class, the sum over the other classes of the
// exponentials of what they are less, and the sum of that over all. Without the greatest one's 1 the sum keeps its
// digits where a network is nearly sure.
struct Softmax {
  float greatest;
  int64_t best;
  float others, sum;
};

// LANES threads share a position whose classes are `stride` apart.
template <int LANES, typename T>
__device__ inline Softmax softmax(const T* logits, int64_t classes, int64_t stride, int lane) {
  Softmax s{-INFINITY, INT64_MAX, 0.0f, 0.0f};
  for (int64_t c = lane; c < classes; c += LANES) {
    const float v = to_float(logits[c * stride]);
    if (v > s.greatest) s.greatest = v, s.best = c;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    const float v = __shfl_xor_sync(0xffffffffu, s.greatest, step);
    const long long best = __shfl_xor_sync(0xffffffffu, static_cast<long long>(s.best), step);
    if (v > s.greatest || (v == s.greatest && best < s.best)) s.greatest = v, s.best = best;
  }
  for (int64_t c = lane; c < classes; c += LANES) {
    const float v = to_float(logits[c * stride]) - s.greatest;
    if (c != s.best) s.others += expf(v);
    s.sum += v;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    s.others += __shfl_xor_sync(0xffffffffu, s.others, step);
    s.sum += __shfl_xor_sync(0xffffffffu, s.sum, step);
  }
  return s;
}

// Position p (a row and a place in it) of logits [rows, classes, inner]: where its classes start.
template <bool ADJACENT>
__device__ inline int64_t start_of(int64_t p, int64_t classes, int64_t inner) {
  return ADJACENT ? p * classes : p / inner * classes * inner + p % inner;
}

// ADJACENT: the classes of a position lie next to each other, and a warp takes them; else a thread does, and
// neighbouring threads read neighbouring positions.
template <typename T, bool ADJACENT>
__global__ void cross_entropy(const T* logits, const int32_t* target, Score* partial, float* loss, float* correct,
                              int64_t positions, int64_t classes, int64_t inner, float smoothing) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x);
  Score score{0.0, 0.0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const T* row = logits + start_of<ADJACENT>(p, classes, inner);
    const int64_t stride = ADJACENT ? 1 : inner;
    const Softmax s = softmax<LANES>(row, classes, stride, lane);
    if (lane != 0) continue;
    const int64_t t = target[p];
    if (t < 0 || t >= classes) {
      score.loss += NAN;  // `guard` then leaves this step out
      continue;
    }
    const float logarithm = log1pf(s.others), own = to_float(row[t * stride]) - s.greatest;
    float value = (1.0f - smoothing) * (logarithm - own);
    if (smoothing != 0.0f) value += smoothing * (logarithm - s.sum / static_cast<float>(classes));
    score.loss += value;
    if (s.best == t) score.correct += 1.0;
  }
  leave(score, partial, loss, correct, static_cast<double>(positions));
}

template <typename T, bool ADJACENT>
__global__ void cross_entropy_backward(const T* logits, const int32_t* target, const MbcControl* control, T* dlogits,
                                       int64_t positions, int64_t classes, int64_t inner, float smoothing,
                                       double weight) {
  constexpr int LANES = ADJACENT ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x);
  const float factor =
      static_cast<float>(weight * static_cast<double>(control->loss_scale) / static_cast<double>(positions));
  const float even = smoothing / static_cast<float>(classes);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; p < positions; p += step) {
    const int64_t start = start_of<ADJACENT>(p, classes, inner), stride = ADJACENT ? 1 : inner;
    const Softmax s = softmax<LANES>(logits + start, classes, stride, lane);
    const int64_t t = target[p];
    const bool valid = t >= 0 && t < classes;
    for (int64_t c = lane; c < classes; c += LANES) {
      const float e = c == s.best ? 1.0f : expf(to_float(logits[start + c * stride]) - s.greatest);
      const float less = c == s.best ? s.others : 1.0f + s.others - e;  // the probability is 1 - less / total
      const float gradient = (c == t ? smoothing - less / (1.0f + s.others) : e / (1.0f + s.others)) - even;
      dlogits[start + c * stride] = from_float<T>(valid ? gradient * factor : 0.0f);
    }
  }
}

// Few classes at many positions: a thread takes the classes of W positions, with nothing to be shared. Channels first
// (LAST false) they are neighbours and read at once; channels last they are a block's threads apart, so that neighbouring
// threads read and write what lies side by side.
template <typename T, int W, bool LAST>
struct Positions {
  int64_t first, count;  // of the thread's; of all
  int64_t start, stride;  // of the first one's first class, and from class to class
  int classes;

  static constexpr int APART = LAST ? THREADS : 1;

  __device__ Positions(int64_t first_, int64_t count_, const Slice& place, int64_t inner, int classes_)
      : first(first_), count(count_), start(LAST ? first_ * classes_ : place(first_)), stride(LAST ? 1 : inner),
        classes(classes_) {}

  __device__ bool there(int w) const { return first + w * APART < count; }
  // Of class c, all positions.
  __device__ void load(const T* logits, int c, float (&v)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] = there(w) ? to_float(logits[start + int64_t{w} * APART * classes + c]) : 0.0f;
    } else {
      const Held<T, W> held = hold<W>(logits + start + c * stride);
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] = to_float(held[w]);
    }
  }
  __device__ void store(T* logits, int c, const float (&v)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w)
        if (there(w)) logits[start + int64_t{w} * APART * classes + c] = from_float<T>(v[w]);
    } else {
      store_floats(logits + start + c * stride, v);
    }
  }
  __device__ void targets(const int32_t* target, int32_t (&t)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w) t[w] = there(w) ? target[first + w * APART] : 0;
    } else {
      const Held<int32_t, W> held = hold<W>(target + first);
#pragma unroll
      for (int w = 0; w < W; ++w) t[w] = held[w];
    }
  }
};

// As `Softmax`, of W positions, with the logit of each one's own class beside it, less the greatest.
template <int W>
struct Softmaxes {
  float greatest[W], others[W], sum[W], own[W];
  int best[W];

  template <typename T, bool LAST>
  __device__ Softmaxes(const Positions<T, W, LAST>& at, const T* logits, const int32_t (&t)[W]) {
#pragma unroll
    for (int w = 0; w < W; ++w) greatest[w] = -INFINITY, others[w] = sum[w] = own[w] = 0.0f, best[w] = INT32_MAX;
    float v[W];
    for (int c = 0; c < at.classes; ++c) {
      at.load(logits, c, v);
#pragma unroll
      for (int w = 0; w < W; ++w)
        if (v[w] > greatest[w]) greatest[w] = v[w], best[w] = c;
    }
    for (int c = 0; c < at.classes; ++c) {
      at.load(logits, c, v);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float less = v[w] - greatest[w];
        if (c != best[w]) others[w] += expf(less);
        if (c == t[w]) own[w] = less;
        sum[w] += less;
      }
    }
  }
};

template <typename T, int W, bool LAST>
__global__ void cross_entropy_pixels(const T* logits, const int32_t* target, Score* partial, float* loss, float* correct,
                                     int64_t positions, int classes, int64_t inner, Slice place, float smoothing) {
  Score score{0.0, 0.0};
  const int64_t step = thread_count() * W;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS * W; block < positions; block += step) {
    const int64_t first = block + threadIdx.x * (LAST ? 1 : W);
    if (first >= positions) break;
    const Positions<T, W, LAST> at(first, positions, place, inner, classes);
    int32_t t[W];
    at.targets(target, t);
    const Softmaxes<W> s(at, logits, t);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      if (!at.there(w)) continue;
      const float logarithm = log1pf(s.others[w]);
      float value = (1.0f - smoothing) * (logarithm - s.own[w]);
      if (smoothing != 0.0f) value += smoothing * (logarithm - s.sum[w] / static_cast<float>(classes));
      score.loss += t[w] < 0 || t[w] >= classes ? NAN : value;  // `guard` then leaves this step out
      if (s.best[w] == t[w]) score.correct += 1.0;
    }
  }
  leave(score, partial, loss, correct, static_cast<double>(positions));
}

template <typename T, int W, bool LAST>
__global__ void cross_entropy_pixels_backward(const T* logits, const int32_t* target, const MbcControl* control,
                                              T* dlogits, int64_t positions, int classes, int64_t inner, Slice place,
                                              float smoothing, double weight) {
  const float factor =
      static_cast<float>(weight * static_cast<double>(control->loss_scale) / static_cast<double>(positions));
  const float even = smoothing / static_cast<float>(classes);
  const int64_t step = thread_count() * W;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS * W; block < positions; block += step) {
    const int64_t first = block + threadIdx.x * (LAST ? 1 : W);
    if (first >= positions) break;
    const Positions<T, W, LAST> at(first, positions, place, inner, classes);
    int32_t t[W];
    at.targets(target, t);
    const Softmaxes<W> s(at, logits, t);
    float part[W];  // of a probability
#pragma unroll
    for (int w = 0; w < W; ++w) part[w] = 1.0f / (1.0f + s.others[w]);
    for (int c = 0; c < classes; ++c) {
      float v[W];
      at.load(logits, c, v);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float e = c == s.best[w] ? 1.0f : expf(v[w] - s.greatest[w]);
        const float less = c == s.best[w] ? s.others[w] : 1.0f + s.others[w] - e;  // the probability is 1 - less * part
        const float gradient = (c == t[w] ? smoothing - less * part[w] : e * part[w]) - even;
        v[w] = t[w] < 0 || t[w] >= classes ? 0.0f : gradient * factor;
      }
      at.store(dlogits, c, v);
    }
  }
}

// Runs the statement with W and LAST for a launch that reads or writes these.
#define MBC_FOR_POSITIONS(a, T, logits, dlogits, target, ...)                                                         \
  do {                                                                                                                \
    constexpr int N = WIDTH<T>;                                                                                       \
    const bool whole = aligned(logits, 16) && aligned(dlogits, 16) && aligned(target, 4 * N) && (a).inner % N == 0;    \
    if ((a).layout == MBC_CHANNELS_LAST) {                                                                            \
      constexpr int W = 4;                                                                                            \
      constexpr bool LAST = true;                                                                                     \
      __VA_ARGS__                                                                                                     \
    } else if (whole) {                                                                                               \
      constexpr int W = N;                                                                                            \
      constexpr bool LAST = false;                                                                                    \
      __VA_ARGS__                                                                                                     \
    } else {                                                                                                          \
      constexpr int W = 1;                                                                                            \
      constexpr bool LAST = false;                                                                                    \
      __VA_ARGS__                                                                                                     \
    }                                                                                                                 \
  } while (0)

template <typename T>
__global__ void mse(const T* prediction, const T* target, Score* partial, float* loss, int64_t elements) {
  Score score{0.0, 0.0};
  for (int64_t i = thread_index(); i < elements; i += thread_count()) {
    const float difference = to_float(prediction[i]) - to_float(target[i]);
    score.loss += static_cast<double>(difference * difference);
  }
  leave(score, partial, loss, nullptr, static_cast<double>(elements));
}

template <typename T>
__global__ void mse_backward(const T* prediction, const T* target, const MbcControl* control, T* dx, int64_t elements,
                             double factor) {
  const float scale = static_cast<float>(factor * static_cast<double>(control->loss_scale));
  for (int64_t i = thread_index(); i < elements; i += thread_count())
    dx[i] = from_float<T>((to_float(prediction[i]) - to_float(target[i])) * scale);
}

constexpr int TERMS = 32;

struct Terms {
  const float* loss[TERMS];
  double weight[TERMS];
  int count;
};

__global__ void weighted_sum(Terms terms, float* total, bool more) {
  double sum = more ? static_cast<double>(total[0]) : 0.0;
  for (int i = 0; i < terms.count; ++i) sum += terms.weight[i] * static_cast<double>(terms.loss[i][0]);
  total[0] = static_cast<float>(sum);
}

}  // namespace mbc

extern "C" const char* mbc_softmax_cross_entropy(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const auto* target = in<int32_t>(call, 1);
  float *loss = out<float>(call, 2), *correct = out<float>(call, 3);
  Score* partial = a.parts > 1 ? out<Score>(call, 4) : nullptr;
  const float smoothing = static_cast<float>(call.reals[0]);
  const unsigned parts = static_cast<unsigned>(a.parts);
  MBC_FOR_TYPE(a.type, T, {
    if (a.layout == MBC_CHANNELS_LAST || a.inner == 1)
      MBC_LAUNCH((cross_entropy<T, true>), parts, dim3(32, 8), call.stream, in<T>(call, 0), target, partial, loss,
                 correct, positions, a.classes, a.inner, smoothing);
    else
      MBC_LAUNCH((cross_entropy<T, false>), parts, dim3(1, THREADS), call.stream, in<T>(call, 0), target, partial, loss,
                 correct, positions, a.classes, a.inner, smoothing);
  });
  if (a.parts > 1)
    MBC_LAUNCH(merge_scores, 1, THREADS, call.stream, partial, a.parts, loss, correct, static_cast<double>(positions));
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyBackwardArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const auto* target = in<int32_t>(call, 1);
  const auto* control = in<MbcControl>(call, 2);
  const float smoothing = static_cast<float>(call.reals[0]);
  const double weight = call.reals[1];
  MBC_FOR_TYPE(a.type, T, {
    if (a.layout == MBC_CHANNELS_LAST || a.inner == 1)
      MBC_LAUNCH((cross_entropy_backward<T, true>), blocks_for(positions, 8), dim3(32, 8), call.stream, in<T>(call, 0),
                 target, control, out<T>(call, 3), positions, a.classes, a.inner, smoothing, weight);
    else
      MBC_LAUNCH((cross_entropy_backward<T, false>), blocks_for(positions), dim3(1, THREADS), call.stream,
                 in<T>(call, 0), target, control, out<T>(call, 3), positions, a.classes, a.inner, smoothing, weight);
  });
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_pixels(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const int classes = static_cast<int>(a.classes);
  const auto* target = in<int32_t>(call, 1);
  float *loss = out<float>(call, 2), *correct = out<float>(call, 3);
  Score* partial = a.parts > 1 ? out<Score>(call, 4) : nullptr;
  const float smoothing = static_cast<float>(call.reals[0]);
  const Slice place(MBC_CHANNELS_FIRST, 1, a.classes, a.inner);
  MBC_FOR_TYPE(a.type, T, {
    const T *logits = in<T>(call, 0), *none = nullptr;
    MBC_FOR_POSITIONS(a, T, logits, none, target, {
      MBC_LAUNCH((cross_entropy_pixels<T, W, LAST>), static_cast<unsigned>(a.parts), THREADS, call.stream, logits, target,
                 partial, loss, correct, positions, classes, a.inner, place, smoothing);
    });
  });
  if (a.parts > 1)
    MBC_LAUNCH(merge_scores, 1, THREADS, call.stream, partial, a.parts, loss, correct, static_cast<double>(positions));
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_pixels_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyBackwardArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const int classes = static_cast<int>(a.classes);
  const auto* target = in<int32_t>(call, 1);
  const auto* control = in<MbcControl>(call, 2);
  const float smoothing = static_cast<float>(call.reals[0]);
  const double weight = call.reals[1];
  const Slice place(MBC_CHANNELS_FIRST, 1, a.classes, a.inner);
  MBC_FOR_TYPE(a.type, T, {
    const T* logits = in<T>(call, 0);
    T* dlogits = out<T>(call, 3);
    MBC_FOR_POSITIONS(a, T, logits, dlogits, target, {
      MBC_LAUNCH((cross_entropy_pixels_backward<T, W, LAST>), blocks_for(positions, THREADS * W), THREADS, call.stream,
                 logits, target, control, dlogits, positions, classes, a.inner, place, smoothing, weight);
    });
  });
  return launched();
}

extern "C" const char* mbc_mse(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MseArguments>(call);
  float* loss = out<float>(call, 2);
  Score* partial = a.parts > 1 ? out<Score>(call, 3) : nullptr;
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((mse<T>), static_cast<unsigned>(a.parts), THREADS, call.stream, in<T>(call, 0), in<T>(call, 1), partial,
               loss, a.elements);
  });
  if (a.parts > 1) {
    float* none = nullptr;
    MBC_LAUNCH(merge_scores, 1, THREADS, call.stream, partial, a.parts, loss, none, static_cast<double>(a.elements));
  }
  return launched();
}

extern "C" const char* mbc_mse_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MseBackwardArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((mse_backward<T>), blocks_for(a.elements), THREADS, call.stream, in<T>(call, 0), in<T>(call, 1),
               in<MbcControl>(call, 2), out<T>(call, 3), a.elements, call.reals[0]);
  });
  return launched();
}

extern "C" const char* mbc_weighted_sum(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WeightedSumArguments>(call);
  float* total = out<float>(call, static_cast<int>(a.inputs));
  for (int64_t done = 0; done < a.inputs; done += TERMS) {
    Terms terms{};
    for (; terms.count < TERMS && done + terms.count < a.inputs; ++terms.count) {
      const int i = static_cast<int>(done) + terms.count;
      terms.loss[terms.count] = in<float>(call, i);
      terms.weight[terms.count] = call.reals[i];
    }
    MBC_LAUNCH(weighted_sum, 1, 1, call.stream, terms, total, done > 0);
  }
  return launched();
}
