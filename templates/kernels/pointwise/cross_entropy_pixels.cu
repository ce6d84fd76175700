// Softmax cross entropy of few classes at many positions (segmentation), and its gradient: a thread takes all classes
// of W positions.
//
// Bytes      logits and class numbers in; the gradient out. Up to four classes are kept in registers (`Kept`), so that
//            logits are read once; more classes are read one by one, the second time from the cache (`Positions`).
// Threads    256. With channels first a thread's positions are adjacent, one vector; with channels last they are 256
//            apart, so that reads of neighbouring threads coalesce.
// Reduction  `parts` blocks write a sum in fp64 each, one block adds them in order (loss.cuh).
// Limit      memory bandwidth.
#include "mbc_control.h"
#include "loss.cuh"

namespace mbc {

constexpr int MOST_KEPT = 4, KEPT_POSITIONS = 4;

// With channels first (LAST false) positions are adjacent, one vector; with channels last they are a block's threads
// apart, so that accesses of neighbouring threads coalesce.
template <typename T, int WIDE, bool LAST>
struct Positions {
  using Element = T;
  const T* logits;
  int64_t first, count;  // first position of the thread; all positions
  int64_t start, stride;  // offset of the first position's first class, and stride of classes
  int classes;

  static constexpr int W = WIDE, POSITION_STRIDE = LAST ? THREADS : 1, AT_ONCE = 1;

  __device__ Positions(const T* from, int64_t first_, int64_t count_, const Slice& class_slice, int64_t inner, int classes_)
      : logits(from), first(first_), count(count_), start(LAST ? first_ * classes_ : class_slice(first_)),
        stride(LAST ? 1 : inner), classes(classes_) {}

  __device__ bool there(int w) const { return first + w * POSITION_STRIDE < count; }
  // Class c of all positions.
  __device__ void load(int c, float (&v)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] = there(w) ? to_float(logits[start + int64_t{w} * POSITION_STRIDE * classes + c]) : 0.0f;
    } else {
      const Held<T, W> held = hold<W>(logits + start + c * stride);
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] = to_float(held[w]);
    }
  }
  // Stores the gradient of class c; `finish` is called after the last class.
  __device__ void keep(T* dlogits, int c, const float (&v)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w)
        if (there(w)) dlogits[start + int64_t{w} * POSITION_STRIDE * classes + c] = from_float<T>(v[w]);
    } else {
      store_floats(dlogits + start + c * stride, v);
    }
  }
  __device__ void finish(T*) const {}
  __device__ void targets(const int32_t* target, int32_t (&t)[W]) const {
    if constexpr (LAST) {
#pragma unroll
      for (int w = 0; w < W; ++w) t[w] = there(w) ? target[first + w * POSITION_STRIDE] : 0;
    } else {
      const Held<int32_t, W> held = hold<W>(target + first);
#pragma unroll
      for (int w = 0; w < W; ++w) t[w] = held[w];
    }
  }
};

// Four neighbouring positions, in as many vectors as there are classes.
template <typename T, int CLASSES, bool LAST>
struct Kept {
  using Element = T;
  static constexpr int W = KEPT_POSITIONS, POSITION_STRIDE = 1, AT_ONCE = CLASSES, classes = CLASSES;
  int64_t first, start, stride;
  Held<T, W> held[CLASSES];
  float gradients[CLASSES * W];

  __device__ Kept(const T* logits, int64_t first_, int64_t, const Slice& class_slice, int64_t inner, int)
      : first(first_), start(LAST ? first * CLASSES : class_slice(first)), stride(LAST ? W : inner) {
#pragma unroll
    for (int i = 0; i < CLASSES; ++i) held[i] = hold<W>(logits + start + i * stride);
  }

  // Where class c of position w is.
  __device__ static constexpr int at(int c, int w) { return LAST ? w * CLASSES + c : c * W + w; }
  __device__ bool there(int) const { return true; }
  __device__ void load(int c, float (&v)[W]) const {
#pragma unroll
    for (int w = 0; w < W; ++w) v[w] = to_float(held[at(c, w) / W][at(c, w) % W]);
  }
  __device__ void keep(T*, int c, const float (&v)[W]) {
#pragma unroll
    for (int w = 0; w < W; ++w) gradients[at(c, w)] = v[w];
  }
  __device__ void finish(T* dlogits) const {
#pragma unroll
    for (int i = 0; i < CLASSES; ++i) {
      float vector[W];
#pragma unroll
      for (int w = 0; w < W; ++w) vector[w] = gradients[i * W + w];
      store_floats(dlogits + start + i * stride, vector);
    }
  }
  __device__ void targets(const int32_t* target, int32_t (&t)[W]) const {
    const Held<int32_t, W> held_targets = hold<W>(target + first);
#pragma unroll
    for (int w = 0; w < W; ++w) t[w] = held_targets[w];
  }
};

// The `Softmax` of loss.cuh for W positions, with the logit of each position's own class, less the greatest.
template <int W>
struct Softmaxes {
  float greatest[W], others[W], sum[W], own[W];
  int best[W];

  template <typename At>
  __device__ Softmaxes(const At& at, const int32_t (&t)[W]) {
#pragma unroll
    for (int w = 0; w < W; ++w) greatest[w] = -INFINITY, others[w] = sum[w] = own[w] = 0.0f, best[w] = INT32_MAX;
    float v[W];
#pragma unroll 4
    for (int c = 0; c < at.classes; ++c) {
      at.load(c, v);
#pragma unroll
      for (int w = 0; w < W; ++w)
        if (v[w] > greatest[w]) greatest[w] = v[w], best[w] = c;
    }
#pragma unroll At::AT_ONCE
    for (int c = 0; c < at.classes; ++c) {
      at.load(c, v);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float less = v[w] - greatest[w], e = expf(less);
        others[w] += c == best[w] ? 0.0f : e;
        if (c == t[w]) own[w] = less;
        sum[w] += less;
      }
    }
  }
};

template <typename At, typename T = typename At::Element>
__global__ void cross_entropy_pixels(const T* logits, const int32_t* target, Score* partial, float* loss,
                                     float* correct, int64_t positions, int classes, int64_t inner, Slice class_slice,
                                     float smoothing) {
  constexpr int W = At::W;
  Score score{0.0, 0.0};
  const int64_t step = thread_count() * W;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS * W; block < positions; block += step) {
    const int64_t first = block + threadIdx.x * (At::POSITION_STRIDE > 1 ? 1 : W);
    if (first >= positions) break;
    const At at(logits, first, positions, class_slice, inner, classes);
    int32_t t[W];
    at.targets(target, t);
    const Softmaxes<W> s(at, t);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      if (!at.there(w)) continue;
      const float logarithm = log1pf(s.others[w]);
      float value = (1.0f - smoothing) * (logarithm - s.own[w]);
      if (smoothing != 0.0f) value += smoothing * (logarithm - s.sum[w] / static_cast<float>(classes));
      score.loss += t[w] < 0 || t[w] >= classes ? NAN : value;  // `guard` then skips this step
      if (s.best[w] == t[w]) score.correct += 1.0;
    }
  }
  store_score(score, partial, loss, correct, static_cast<double>(positions));
}

template <typename At, typename T = typename At::Element>
__global__ void cross_entropy_pixels_backward(const T* logits, const int32_t* target, const MbcControl* control,
                                              T* dlogits, int64_t positions, int classes, int64_t inner, Slice class_slice,
                                              float smoothing, double weight) {
  constexpr int W = At::W;
  const float factor = static_cast<float>(weight * static_cast<double>(control->loss_scale));
  const float even = smoothing / static_cast<float>(classes);
  const int64_t step = thread_count() * W;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * THREADS * W; block < positions; block += step) {
    const int64_t first = block + threadIdx.x * (At::POSITION_STRIDE > 1 ? 1 : W);
    if (first >= positions) break;
    At at(logits, first, positions, class_slice, inner, classes);
    int32_t t[W];
    at.targets(target, t);
    const Softmaxes<W> s(at, t);
    float part[W];  // factor of a probability
#pragma unroll
    for (int w = 0; w < W; ++w) part[w] = 1.0f / (1.0f + s.others[w]);
#pragma unroll At::AT_ONCE
    for (int c = 0; c < at.classes; ++c) {
      float v[W];
      at.load(c, v);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float power = expf(v[w] - s.greatest[w]), e = c == s.best[w] ? 1.0f : power;
        const float less = c == s.best[w] ? s.others[w] : 1.0f + s.others[w] - e;  // the probability is 1 - less * part
        const float gradient = (c == t[w] ? smoothing - less * part[w] : e * part[w]) - even;
        v[w] = t[w] < 0 || t[w] >= classes ? 0.0f : gradient * factor;
      }
      at.keep(dlogits, c, v);
    }
    at.finish(dlogits);
  }
}

template <typename At>
struct TypeTag {
  using Type = At;
};

template <typename T, int CLASSES = 2, typename Run>
void for_kept(int64_t classes, bool last, Run run) {
  if (classes != CLASSES) {
    if constexpr (CLASSES < MOST_KEPT) for_kept<T, CLASSES + 1>(classes, last, run);
  } else if (last) {
    run(TypeTag<Kept<T, CLASSES, true>>{});
  } else {
    run(TypeTag<Kept<T, CLASSES, false>>{});
  }
}

// Calls `run` with the type by which a launch reads the positions of `logits`, and writes those of `dlogits`, if it
// does.
template <typename T, typename Arguments, typename Run>
void for_positions(const Arguments& a, const T* logits, const T* dlogits, const int32_t* target, Run run) {
  constexpr int N = WIDTH<T>;
  const bool last = a.layout == MBC_CHANNELS_LAST, whole = aligned(logits, 16) && aligned(dlogits, 16);
  const int64_t together = last ? a.rows * a.inner : a.inner;
  if (a.channels >= 2 && a.channels <= MOST_KEPT && whole && aligned(target, 16) && together % KEPT_POSITIONS == 0)
    for_kept<T>(a.channels, last, run);
  else if (last)
    run(TypeTag<Positions<T, 4, true>>{});
  else if (whole && aligned(target, 4 * N) && a.inner % N == 0)
    run(TypeTag<Positions<T, N, false>>{});
  else
    run(TypeTag<Positions<T, 1, false>>{});
}

}  // namespace mbc

extern "C" const char* mbc_softmax_cross_entropy_pixels(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const int classes = static_cast<int>(a.channels);
  const auto* target = in<int32_t>(call, 1);
  float *loss = out<float>(call, 2), *correct = out<float>(call, 3);
  Score* partial = a.parts > 1 ? out<Score>(call, 4) : nullptr;
  const float smoothing = static_cast<float>(call.reals[0]);
  const Slice class_slice(MBC_CHANNELS_FIRST, 1, a.channels, a.inner);
  MBC_FOR_TYPE(a.type, T, {
    const T *logits = in<T>(call, 0), *none = nullptr;
    for_positions(a, logits, none, target, [&](auto tag) {
      using At = typename decltype(tag)::Type;
      MBC_LAUNCH((cross_entropy_pixels<At>), static_cast<unsigned>(a.parts), THREADS, call.stream, logits, target,
                 partial, loss, correct, positions, classes, a.inner, class_slice, smoothing);
    });
  });
  merge(partial, a.parts, loss, correct, positions, call.stream);
  return launched();
}

extern "C" const char* mbc_softmax_cross_entropy_pixels_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<CrossEntropyArguments>(call);
  const int64_t positions = a.rows * a.inner;
  const int classes = static_cast<int>(a.channels);
  const auto* target = in<int32_t>(call, 1);
  const auto* control = in<MbcControl>(call, 2);
  const float smoothing = static_cast<float>(call.reals[0]);
  const double weight = call.reals[1] / static_cast<double>(positions);  // the scale is a power of two: nothing rounds
  const Slice class_slice(MBC_CHANNELS_FIRST, 1, a.channels, a.inner);
  MBC_FOR_TYPE(a.type, T, {
    const T* logits = in<T>(call, 0);
    T* dlogits = out<T>(call, 3);
    for_positions(a, logits, dlogits, target, [&](auto tag) {
      using At = typename decltype(tag)::Type;
      MBC_LAUNCH((cross_entropy_pixels_backward<At>), blocks_for(positions, THREADS * At::W), THREADS, call.stream,
                 logits, target, control, dlogits, positions, classes, a.inner, class_slice, smoothing, weight);
    });
  });
  return launched();
}
