// Comparisons of segmentation, class by class: the sums of Dice and Tversky losses, image by image, with the sum of
// (focal) cross entropies beside them; the gradient of all these sums in one pass; and the number of positions of a
// mini-batch that logits and targets give to each class. Probabilities are computed again wherever they are needed.
// Bytes      logits and target in; for the sums logits are read twice more, from the cache.
// Threads    256. Sums: a block takes tiles of 1024 positions of an image (or of all images), a thread 4 of them, whose
//            maximum and total stay in registers; then class by class a warp adds by shuffles, and for 32 classes
//            together the 8 warps add through shared memory. Gradient: a thread for each position.
// Reduction  `parts` blocks for each image write sums in fp64, which are added in order: the same bits in every run.
// Limit      memory bandwidth up to some 20 classes, then the shuffles.
#include "mbc_control.h"
#include "cross_entropy.cuh"
#include "segmentation_arguments.h"

namespace mbc {

// Positions of a thread in a tile are as in mbc/kernels/cuda/pointwise/segmentation.py.
constexpr int THREAD_POSITIONS = 4, SUM_WARPS = THREADS / 32, CLASSES_AT_ONCE = 32;

// Targets and logits [rows, classes, inner], and which positions count. CLASSES: their number, 0 if it is not known to the
// compiler, which then reads the logits of one position after another.
template <typename T, int CLASSES>
struct Labelled {
  const T* logits;
  const int32_t* target;
  int64_t any_classes, inner;
  bool last, ignores;
  int64_t ignored;

  __device__ int64_t classes() const { return CLASSES > 0 ? CLASSES : any_classes; }
  __device__ const T* row(int64_t p) const {
    return logits + (last ? start_of<true>(p, classes(), inner) : start_of<false>(p, classes(), inner));
  }
  __device__ int64_t stride() const { return last ? 1 : inner; }
  __device__ bool left_out(int64_t t) const { return ignores && t == ignored; }
  __device__ bool is_class(int64_t t) const { return t >= 0 && t < classes(); }
};

struct ClassPair { float first, second; };

// How sums are formed (`Dice` in mbc/ops/dice.py).
struct DiceSettings {
  int64_t first;  // class of the first index
  bool squared, entropy;  // entropy: a position's cross entropy is computed
  float of_p, of_t, focus, zeros, ones;

  __device__ float size(float p, float t) const { return squared ? of_p * p * p + of_t * t * t : of_p * p + of_t * t; }
  // The derivative of the sums by p, for the slopes of the overlap and of the size.
  __device__ float slope(float both, float size, float p, float t) const {
    return both * t + size * of_p * (squared ? 2.0f * p : 1.0f);
  }
  // A cross entropy of a probability that is `less` than 1 by that, and the factor of its derivative by the logit.
  __device__ float focused(float less, float loss) const { return focus == 0.0f ? loss : powf(less, focus) * loss; }
  __device__ float steepness(float p, float less, float loss) const {
    return focus == 0.0f ? 1.0f : powf(less, focus) + focus * p * loss * powf(less, focus - 1.0f);
  }
};

// A probability, 1 less it, and the logarithms of both, negative.
struct Probability { float p, q, log_p, log_q; };

__device__ inline Probability of_sigmoid(float x) {
  const float e = expf(-fabsf(x)), more = 1.0f / (1.0f + e), less = e / (1.0f + e), logarithm = log1pf(e);
  return {x < 0.0f ? less : more, x < 0.0f ? more : less, logarithm - fminf(x, 0.0f), logarithm + fmaxf(x, 0.0f)};
}

// A pair for each class from the first index on, then cross entropy and count. REGIONS: of the sigmoid.
template <typename T, int CLASSES, bool REGIONS>
struct DiceTerms {
  Labelled<T, CLASSES> of;
  const T* regions;  // the target, in the order of the logits
  DiceSettings settings;

  struct At {
    const T* row;
    Softmax softmax;
    int64_t own;
    float counts;  // 0: left out; NaN: the target is no class, and `guard` skips this step
    float entropy;
  };
  __device__ float logit(const At& at, int64_t c) const { return to_float(at.row[c * of.stride()]); }
  __device__ float wanted(const At& at, int64_t c) const {
    return REGIONS ? to_float(regions[at.row - of.logits + c * of.stride()]) : c == at.own ? 1.0f : 0.0f;
  }
  __device__ Probability probability(const At& at, int64_t c) const {
    const float x = logit(at, c), total = 1.0f + at.softmax.others, less = x - at.softmax.greatest;
    if (REGIONS) return of_sigmoid(x);
    const float p = expf(less) / total;
    return {p, c == at.softmax.best ? at.softmax.others / total : 1.0f - p, log1pf(at.softmax.others) - less, 0.0f};
  }
  __device__ At none() const { return {nullptr, {0.0f, 0, 0.0f, 0.0f}, 0, 0.0f, 0.0f}; }
  __device__ At at(int64_t p) const {
    At at = none();
    if (!REGIONS && of.left_out(of.target[p])) return at;
    at.row = of.row(p);
    at.counts = 1.0f;
    if (!REGIONS) {
      at.own = of.target[p];
      at.softmax = softmax<1>(at.row, of.classes(), of.stride(), 0);
      if (!of.is_class(at.own)) at.counts = at.entropy = NAN;
    }
    if (!settings.entropy || at.counts != 1.0f) return at;
    for (int64_t c = REGIONS ? 0 : at.own; c < (REGIONS ? of.classes() : at.own + 1); ++c) {
      const Probability r = probability(at, c);
      const float t = wanted(at, c), ones = !REGIONS && c == 0 ? settings.zeros : settings.ones;
      at.entropy += ones * t * settings.focused(r.q, r.log_p);
      if (REGIONS) at.entropy += settings.zeros * (1.0f - t) * settings.focused(r.p, r.log_q);
    }
    return at;
  }
  __device__ ClassPair pair(const At& at, int64_t column) const {
    const int64_t c = settings.first + column;
    if (at.counts == 0.0f) return {0.0f, 0.0f};
    if (c >= of.classes()) return {at.entropy, REGIONS ? static_cast<float>(of.classes()) : at.counts};
    const float p = probability(at, c).p * at.counts, t = wanted(at, c);
    return {p * t, settings.size(p, t)};
  }
};

// True if logits and target both give a position to a class, and whether at least one of them does.
template <typename T>
struct OverlapTerms {
  Labelled<T, 0> of;

  struct At {
    int64_t best, own;  // -1: counts nowhere
  };
  __device__ At at(int64_t p) const {
    const int64_t t = of.target[p];
    if (of.left_out(t) || !of.is_class(t)) return none();
    const T* row = of.row(p);
    float greatest = to_float(row[0]);
    int64_t best = 0;
    for (int64_t c = 1; c < of.classes(); ++c) {  // among equals the first; NaN above all
      const float v = to_float(row[c * of.stride()]);
      if (v > greatest || (v != v && greatest == greatest)) greatest = v, best = c;
    }
    return {best, t};
  }
  __device__ At none() const { return {-1, -1}; }
  __device__ ClassPair pair(const At& at, int64_t c) const {
    return {at.best == c && at.own == c ? 1.0f : 0.0f, at.best == c || at.own == c ? 1.0f : 0.0f};
  }
};

// Each of the `parts` blocks of an image takes every parts-th tile of its positions.
template <typename Terms>
__global__ void __launch_bounds__(THREADS, 4) class_sums(Terms terms, Score* partial, int64_t positions, int64_t classes, int64_t parts) {
  __shared__ ClassPair shared[SUM_WARPS][CLASSES_AT_ONCE];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t first = blockIdx.x / parts * positions, part = blockIdx.x % parts, tile = static_cast<int64_t>(THREAD_POSITIONS) * THREADS;
  Score* own = partial + blockIdx.x * classes;
  for (int64_t c = threadIdx.x; c < classes; c += THREADS) own[c] = {0.0, 0.0};
  for (int64_t start = part * tile; start < positions; start += parts * tile) {
    typename Terms::At at[THREAD_POSITIONS];
#pragma unroll
    for (int i = 0; i < THREAD_POSITIONS; ++i) {
      const int64_t p = start + i * THREADS + threadIdx.x;
      at[i] = p < positions ? terms.at(first + p) : terms.none();
    }
    for (int64_t group = 0; group < classes; group += CLASSES_AT_ONCE) {
      __syncthreads();
      for (int64_t c = group; c < classes && c < group + CLASSES_AT_ONCE; ++c) {
        ClassPair sum{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < THREAD_POSITIONS; ++i) {
          const ClassPair pair = terms.pair(at[i], c);
          sum.first += pair.first;
          sum.second += pair.second;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          sum.first += __shfl_xor_sync(0xffffffffu, sum.first, step);
          sum.second += __shfl_xor_sync(0xffffffffu, sum.second, step);
        }
        if (lane == 0) shared[warp][c - group] = sum;
      }
      __syncthreads();
      const int64_t c = group + threadIdx.x;
      if (threadIdx.x < CLASSES_AT_ONCE && c < classes)
        for (int w = 0; w < SUM_WARPS; ++w) {
          own[c].loss += static_cast<double>(shared[w][threadIdx.x].first);
          own[c].correct += static_cast<double>(shared[w][threadIdx.x].second);
        }
    }
  }
}

// The sums of all parts: `classes` first sums for each image, then as many second sums. A block adds those of a class.
__global__ void add_class_sums(const Score* partial, float* sums, int64_t classes, int64_t parts) {
  const int64_t n = blockIdx.x / classes, c = blockIdx.x % classes;
  Score score{0.0, 0.0};
  for (int64_t k = threadIdx.x; k < parts; k += THREADS) {
    score.loss += partial[(n * parts + k) * classes + c].loss;
    score.correct += partial[(n * parts + k) * classes + c].correct;
  }
  if (score = sum_block(score); threadIdx.x > 0) return;
  sums[2 * n * classes + c] = static_cast<float>(score.loss);
  sums[(2 * n + 1) * classes + c] = static_cast<float>(score.correct);
}

template <typename Terms>
void run_class_sums(const MbcCall& call, const Terms& terms, int64_t rows, int64_t positions) {
  const auto& a = arguments<SegmentationArguments>(call);
  Score* partial = out<Score>(call, 3);
  MBC_LAUNCH((class_sums<Terms>), static_cast<unsigned>(rows * a.parts), THREADS, call.stream, terms, partial, positions,
             a.columns, a.parts);
  MBC_LAUNCH(add_class_sums, static_cast<unsigned>(rows * a.columns), THREADS, call.stream, partial, out<float>(call, 2),
             a.columns, a.parts);
}

template <typename T, int CLASSES>
Labelled<T, CLASSES> labelled(const MbcCall& call) {
  const auto& a = arguments<SegmentationArguments>(call);
  const bool last = a.layout == MBC_CHANNELS_LAST || a.inner == 1;
  return {in<T>(call, 0), in<int32_t>(call, 1), a.classes, a.inner, last, a.ignores != 0, a.ignored};
}

template <typename T, int CLASSES, bool REGIONS>
__global__ void dice_sums_backward(DiceTerms<T, CLASSES, REGIONS> terms, const float* slopes, T* gradient, int64_t positions,
                                   int64_t columns) {
  const auto& of = terms.of;
  const auto& settings = terms.settings;
  for (int64_t p = thread_index(); p < positions; p += thread_count()) {
    const auto at = terms.at(p);
    T* dlogits = gradient + (of.row(p) - of.logits);
    if (at.counts != 1.0f) {
      for (int64_t c = 0; c < of.classes(); ++c) dlogits[c * of.stride()] = from_float<T>(0.0f);
      continue;
    }
    const float* of_both = slopes + 2 * quotient(p, of.inner) * columns;
    const bool has_entropy = columns > of.classes() - settings.first;
    const float entropy = has_entropy ? of_both[columns - 1] : 0.0f;
    const auto slope = [&](int64_t c, float share) {
      const int64_t i = c - settings.first;
      return i < 0 ? 0.0f : settings.slope(of_both[i], of_both[columns + i], share, terms.wanted(at, c));
    };
    float mean = 0.0f, own = 0.0f;  // mean of the slopes by probabilities; slope of the position's cross entropy
    if (!REGIONS) {
      const Probability r = terms.probability(at, at.own);
      own = entropy * (at.own == 0 ? settings.zeros : settings.ones) * settings.steepness(r.p, r.q, r.log_p);
      for (int64_t c = settings.first; c < of.classes(); ++c) {
        const float share = terms.probability(at, c).p;
        mean += share * slope(c, share);
      }
    }
    for (int64_t c = 0; c < of.classes(); ++c) {
      const Probability r = terms.probability(at, c);
      float value = r.p * ((REGIONS ? r.q : 1.0f) * slope(c, r.p) - mean);
      if (REGIONS && has_entropy) {
        const float t = terms.wanted(at, c);
        value += entropy * (settings.zeros * (1.0f - t) * r.p * settings.steepness(r.q, r.p, r.log_q) -
                            settings.ones * t * r.q * settings.steepness(r.p, r.q, r.log_p));
      } else {
        value += own * (c == at.own ? -r.q : r.p);
      }
      dlogits[c * of.stride()] = from_float<T>(value);
    }
  }
}

// The loss of an index, (1 - index) ** power, and its derivatives by the sums.
struct DiceIndex {
  int64_t columns, classes;
  double smooth, below, missing, power, entropy, share;

  __device__ static bool is_small(double x) { return x <= 1e-8; }  // as in mbc/ops/dice.py; NaN stays
  __device__ static double clipped(double x) { return is_small(x) ? 1e-8 : x; }
  __device__ double size(double both, double sizes) const { return missing * both + sizes + below; }
  __device__ double index(double both, double sizes) const { return (2.0 * both + smooth) / clipped(size(both, sizes)); }
  __device__ double loss(double both, double sizes) const {
    const double drop = 1.0 - index(both, sizes);
    return power == 1.0 ? drop : pow(clipped(drop), power);
  }
  __device__ void slopes(double both, double sizes, double factor, float* slopes) const {
    const double divisor = size(both, sizes), at = index(both, sizes), drop = 1.0 - at;
    const double outer = power == 1.0 ? -1.0 : is_small(drop) ? 0.0 : -power * pow(drop, power - 1.0);
    const double inner = is_small(divisor) ? 0.0 : at, scaled = outer * factor / clipped(divisor);
    slopes[0] = static_cast<float>(scaled * (2.0 - missing * inner));
    slopes[columns] = static_cast<float>(-scaled * inner);
  }
};

// `sums` are [images or 1, 2, columns], `total` those of all images; the last column may be that of the cross entropies.
__global__ void dice_mean(const float* sums, const float* total, float* loss, DiceIndex index, int64_t images) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < images * index.classes; i += THREADS) {
    const float* both = sums + 2 * (i / index.classes) * index.columns + i % index.classes;
    score.loss += index.loss(both[0], both[index.columns]) / static_cast<double>(images * index.classes);
  }
  score = sum_block(score);
  if (threadIdx.x != 0) return;
  if (index.entropy != 0.0) score.loss += index.entropy * total[index.columns - 1] / total[2 * index.columns - 1];
  loss[0] = static_cast<float>(score.loss);
}

// `batch`: the slopes of the indices over the batch, `sums`, for each of the images.
__global__ void dice_mean_backward(const float* sums, const float* total, const MbcControl* control, float* slopes,
                                   DiceIndex index, int64_t rows, bool batch, double weight) {
  const double factor = weight * static_cast<double>(control->loss_scale);
  const double images = batch ? index.share : static_cast<double>(rows);
  for (int64_t i = thread_index(); i < rows * index.columns; i += thread_count()) {
    const int64_t at = 2 * (i / index.columns) * index.columns + i % index.columns;
    const float* both = sums + (batch ? i % index.columns : at);
    if (i % index.columns < index.classes) {
      index.slopes(both[0], both[index.columns], factor / (images * static_cast<double>(index.classes)), slopes + at);
    } else {
      slopes[at] = static_cast<float>(factor * index.entropy / (total[2 * index.columns - 1] * index.share));
      slopes[at + index.columns] = 0.0f;
    }
  }
}

__global__ void mean_iou(const float* overlap, float* mean, int64_t classes) {
  Score score{0.0, 0.0};
  for (int64_t c = threadIdx.x; c < classes; c += THREADS) {
    const double both = overlap[c], either = overlap[classes + c];
    if (!(either > 0.0)) continue;
    score.loss += both / either;
    score.correct += 1.0;
  }
  score = sum_block(score);
  if (threadIdx.x == 0) mean[0] = static_cast<float>(score.loss / score.correct);
}

template <typename T, int CLASSES, bool REGIONS>
void run_dice_sums(const MbcCall& call, bool backward) {
  const auto& a = arguments<SegmentationArguments>(call);
  const DiceSettings settings{a.first, a.squared != 0, a.entropy != 0 && !backward, real(call, 0), real(call, 1),
                              real(call, 2), real(call, 3), real(call, 4)};
  const DiceTerms<T, CLASSES, REGIONS> terms{labelled<T, CLASSES>(call), in<T>(call, 1), settings};
  const int64_t positions = a.rows * a.inner;
  if (!backward)
    run_class_sums(call, terms, a.rows, a.inner);
  else
    MBC_LAUNCH((dice_sums_backward<T, CLASSES, REGIONS>), blocks_for(positions), THREADS, call.stream, terms, in<float>(call, 2),
               out<T>(call, 3), positions, a.columns);
}

inline const char* run_dice_sums(const MbcCall& call, bool backward) {
  const auto& a = arguments<SegmentationArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const auto run = a.sigmoid != 0 ? run_dice_sums<T, 0, true> : a.classes == 2 ? run_dice_sums<T, 2, false>
                     : a.classes == 3 ? run_dice_sums<T, 3, false> : a.classes == 4 ? run_dice_sums<T, 4, false>
                     : run_dice_sums<T, 0, false>;
    run(call, backward);
  });
  return launched();
}

inline const char* run_dice_mean(const MbcCall& call, bool backward) {
  const auto& a = arguments<DiceMeanArguments>(call);
  const auto& of = call.reals;
  const DiceIndex index{a.columns, a.classes, of[0], of[1], of[2], of[3], of[4], of[5]};
  const int last = 1 + static_cast<int>(a.totals);
  const bool batch = a.batch != 0;
  const float *total = in<float>(call, last - 1), *sums = batch ? total : in<float>(call, 0);
  if (backward)
    MBC_LAUNCH(dice_mean_backward, blocks_for(a.rows * a.columns), THREADS, call.stream, sums, total,
               in<MbcControl>(call, last), out<float>(call, last + 1), index, a.rows, batch, of[6]);
  else
    MBC_LAUNCH(dice_mean, 1, THREADS, call.stream, sums, total, out<float>(call, last), index, batch ? 1 : a.rows);
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_dice_sums(const MbcCall& call) { return mbc::run_dice_sums(call, false); }

extern "C" const char* mbc_dice_sums_backward(const MbcCall& call) { return mbc::run_dice_sums(call, true); }

extern "C" const char* mbc_dice_mean(const MbcCall& call) { return mbc::run_dice_mean(call, false); }

extern "C" const char* mbc_dice_mean_backward(const MbcCall& call) { return mbc::run_dice_mean(call, true); }

extern "C" const char* mbc_class_overlap(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SegmentationArguments>(call);
  MBC_FOR_TYPE(a.type, T, { run_class_sums(call, OverlapTerms<T>{labelled<T, 0>(call)}, 1, a.rows * a.inner); });
  return launched();
}

extern "C" const char* mbc_mean_iou_of_overlap(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<MeanIouArguments>(call);
  MBC_LAUNCH(mean_iou, 1, THREADS, call.stream, in<float>(call, 0), out<float>(call, 1), a.classes);
  return launched();
}
