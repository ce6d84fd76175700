// Comparisons of segmentation, class by class: the sums of the Dice loss, image by image, with its gradient, and the
// number of positions of a mini-batch that logits and targets give to each class.
// Bytes      logits and target in; for the sums logits are read twice more, from the cache.
// Threads    256. Sums: a block takes tiles of 2048 positions of an image (or of all images), a thread 8 of them, whose
//            maximum and total stay in registers; then class by class a warp adds by shuffles, and for 32 classes
//            together the 8 warps add through shared memory. Gradient: a thread for each position.
// Reduction  `parts` blocks for each image write sums in fp64, which are added in order: the same bits in every run.
// Limit      memory bandwidth up to some 20 classes, then the shuffles.
#include "mbc_control.h"
#include "cross_entropy.cuh"
#include "segmentation_arguments.h"

namespace mbc {

constexpr int THREAD_POSITIONS = 8;                 // positions of a thread
constexpr int SUM_WARPS = THREADS / 32;
constexpr int CLASSES_AT_ONCE = 32;

// Targets and logits [rows, classes, inner], and which positions count.
template <typename T>
struct Labelled {
  const T* logits;
  const int32_t* target;
  int64_t classes, inner;
  bool last, ignores;
  int64_t ignored;

  __device__ const T* row(int64_t p) const {
    return logits + (last ? start_of<true>(p, classes, inner) : start_of<false>(p, classes, inner));
  }
  __device__ int64_t stride() const { return last ? 1 : inner; }
  __device__ bool left_out(int64_t t) const { return ignores && t == ignored; }
  __device__ bool is_class(int64_t t) const { return t >= 0 && t < classes; }
};

struct ClassPair {
  float first, second;
};

// p t and p + t of a position.
template <typename T>
struct DiceTerms {
  Labelled<T> of;

  struct At {
    const T* row;
    float greatest, total;
    int64_t own;
    float counts;  // 0: left out; NaN: the target is no class, and `guard` skips this step
  };
  __device__ At at(int64_t p) const {
    const int64_t t = of.target[p];
    if (of.left_out(t)) return {nullptr, 0.0f, 1.0f, t, 0.0f};
    const T* row = of.row(p);
    const Softmax s = softmax<1>(row, of.classes, of.stride(), 0);
    return {row, s.greatest, 1.0f + s.others, t, of.is_class(t) ? 1.0f : NAN};
  }
  __device__ At none() const { return {nullptr, 0.0f, 1.0f, 0, 0.0f}; }
  __device__ ClassPair pair(const At& at, int64_t c) const {
    if (at.counts == 0.0f) return {0.0f, 0.0f};
    const float p = expf(to_float(at.row[c * of.stride()]) - at.greatest) / at.total * at.counts;
    return c == at.own ? ClassPair{p, p + 1.0f} : ClassPair{0.0f * p, p};
  }
};

// True if logits and target both give a position to a class, and whether at least one of them does.
template <typename T>
struct OverlapTerms {
  Labelled<T> of;

  struct At {
    int64_t best, own;  // -1: counts nowhere
  };
  __device__ At at(int64_t p) const {
    const int64_t t = of.target[p];
    if (of.left_out(t) || !of.is_class(t)) return none();
    const T* row = of.row(p);
    float greatest = to_float(row[0]);
    int64_t best = 0;
    for (int64_t c = 1; c < of.classes; ++c) {  // among equals the first; NaN above all
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
__global__ void class_sums(Terms terms, Score* partial, int64_t positions, int64_t classes, int64_t parts) {
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

// The sums of all parts: `classes` first sums for each image, then as many second sums.
__global__ void add_class_sums(const Score* partial, float* sums, int64_t rows, int64_t classes, int64_t parts) {
  for (int64_t i = thread_index(); i < rows * classes; i += thread_count()) {
    const int64_t n = i / classes, c = i % classes;
    Score score{0.0, 0.0};
    for (int64_t k = 0; k < parts; ++k) {
      score.loss += partial[(n * parts + k) * classes + c].loss;
      score.correct += partial[(n * parts + k) * classes + c].correct;
    }
    sums[2 * n * classes + c] = static_cast<float>(score.loss);
    sums[(2 * n + 1) * classes + c] = static_cast<float>(score.correct);
  }
}

template <typename Terms>
void run_class_sums(const MbcCall& call, const Terms& terms, int64_t rows, int64_t positions) {
  const auto& a = arguments<SegmentationArguments>(call);
  Score* partial = out<Score>(call, 3);
  MBC_LAUNCH((class_sums<Terms>), static_cast<unsigned>(rows * a.parts), THREADS, call.stream, terms, partial, positions,
             a.classes, a.parts);
  MBC_LAUNCH(add_class_sums, blocks_for(rows * a.classes), THREADS, call.stream, partial, out<float>(call, 2), rows,
             a.classes, a.parts);
}

template <typename T>
Labelled<T> labelled(const MbcCall& call) {
  const auto& a = arguments<SegmentationArguments>(call);
  const bool last = a.layout == MBC_CHANNELS_LAST || a.inner == 1;
  return {in<T>(call, 0), in<int32_t>(call, 1), a.classes, a.inner, last, a.ignores != 0, a.ignored};
}

template <typename T>
__global__ void dice_sums_backward(Labelled<T> of, const float* slopes, T* gradient, int64_t positions) {
  const int64_t stride = of.stride();
  for (int64_t p = thread_index(); p < positions; p += thread_count()) {
    const int64_t t = of.target[p];
    const T* row = of.row(p);
    T* dlogits = gradient + (row - of.logits);
    if (of.left_out(t) || !of.is_class(t)) {
      for (int64_t c = 0; c < of.classes; ++c) dlogits[c * stride] = from_float<T>(0.0f);
      continue;
    }
    const Softmax s = softmax<1>(row, of.classes, stride, 0);
    const float total = 1.0f + s.others;
    const float* of_both = slopes + 2 * (p / of.inner) * of.classes;
    const float* of_sizes = of_both + of.classes;
    float mean = 0.0f;  // mean of the slopes by probabilities
    for (int64_t c = 0; c < of.classes; ++c)
      mean += expf(to_float(row[c * stride]) - s.greatest) / total * (of_sizes[c] + (c == t ? of_both[c] : 0.0f));
    for (int64_t c = 0; c < of.classes; ++c) {
      const float share = expf(to_float(row[c * stride]) - s.greatest) / total;
      dlogits[c * stride] = from_float<T>(share * (of_sizes[c] + (c == t ? of_both[c] : 0.0f) - mean));
    }
  }
}

__global__ void dice_mean(const float* sums, float* loss, int64_t rows, int64_t classes, double smooth) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < rows * classes; i += THREADS) {
    const float* of_image = sums + 2 * (i / classes) * classes;
    const double both = of_image[i % classes], sizes = of_image[classes + i % classes];
    score.loss += 1.0 - (2.0 * both + smooth) / (sizes + smooth);
  }
  score = sum_block(score);
  if (threadIdx.x == 0) loss[0] = static_cast<float>(score.loss / static_cast<double>(rows * classes));
}

__global__ void dice_mean_backward(const float* sums, const MbcControl* control, float* slopes, int64_t rows,
                                   int64_t classes, double smooth, double weight) {
  const double factor = weight * static_cast<double>(control->loss_scale) / static_cast<double>(rows * classes);
  for (int64_t i = thread_index(); i < rows * classes; i += thread_count()) {
    const int64_t first = 2 * (i / classes) * classes + i % classes;
    const double both = sums[first], sizes = sums[first + classes], below = factor / (sizes + smooth);
    slopes[first] = static_cast<float>(-2.0 * below);
    slopes[first + classes] = static_cast<float>((2.0 * both + smooth) / (sizes + smooth) * below);
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

}  // namespace mbc

extern "C" const char* mbc_dice_sums(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SegmentationArguments>(call);
  MBC_FOR_TYPE(a.type, T, { run_class_sums(call, DiceTerms<T>{labelled<T>(call)}, a.rows, a.inner); });
  return launched();
}

extern "C" const char* mbc_dice_sums_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SegmentationArguments>(call);
  const int64_t positions = a.rows * a.inner;
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((dice_sums_backward<T>), blocks_for(positions), THREADS, call.stream, labelled<T>(call),
               in<float>(call, 2), out<T>(call, 3), positions);
  });
  return launched();
}

extern "C" const char* mbc_dice_mean(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DiceMeanArguments>(call);
  MBC_LAUNCH(dice_mean, 1, THREADS, call.stream, in<float>(call, 0), out<float>(call, 1), a.rows, a.classes,
             call.reals[0]);
  return launched();
}

extern "C" const char* mbc_dice_mean_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DiceMeanArguments>(call);
  MBC_LAUNCH(dice_mean_backward, blocks_for(a.rows * a.classes), THREADS, call.stream, in<float>(call, 0),
             in<MbcControl>(call, 1), out<float>(call, 2), a.rows, a.classes, call.reals[0], call.reals[1]);
  return launched();
}

extern "C" const char* mbc_class_overlap(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<SegmentationArguments>(call);
  MBC_FOR_TYPE(a.type, T, { run_class_sums(call, OverlapTerms<T>{labelled<T>(call)}, 1, a.rows * a.inner); });
  return launched();
}

extern "C" const char* mbc_mean_iou_of_overlap(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<DiceMeanArguments>(call);
  MBC_LAUNCH(mean_iou, 1, THREADS, call.stream, in<float>(call, 0), out<float>(call, 1), a.classes);
  return launched();
}
