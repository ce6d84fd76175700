// Softmax cross entropy of few classes at many positions, and its gradient: a thread takes the classes of W positions,
// with nothing to be shared. Channels first (LAST false) they are neighbours and read at once; channels last they are a
// block's threads apart, so that neighbouring threads read and write what lies side by side.
#include "mbc_control.h"
#include "mbc_loss.cuh"

namespace mbc {

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

// As `Softmax` of mbc_loss.cuh, of W positions, with the logit of each one's own class beside it, less the greatest.
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

}  // namespace mbc

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
  merge(partial, a.parts, loss, correct, positions, call.stream);
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
