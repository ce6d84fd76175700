// Losses are reduced in fp64 in two stages of fixed order: `parts` blocks write a sum each, then one block adds them;
// with one part the first stage finishes alone.
#pragma once

#include "device.cuh"
#include "loss_arguments.h"

namespace mbc {

// Softmax state of a position: the largest logit and its class; the sum of exp(logit - largest) over the other classes;
// the sum of logit - largest over all classes. The first sum omits the 1 of the largest class, and so keeps its digits
// if a network is nearly certain.
struct Softmax {
  float greatest;
  int64_t best;
  float others, sum;

  // The loss of a position whose own class has the logit `own`.
  __device__ float loss(float own, int64_t classes, float smoothing) const {
    const float logarithm = log1pf(others);
    float value = (1.0f - smoothing) * (logarithm - (own - greatest));
    if (smoothing != 0.0f) value += smoothing * (logarithm - sum / static_cast<float>(classes));
    return value;
  }
  // The gradient of class c if t is the position's own class, before weights; `even`: the smoothing's share of a class.
  __device__ float gradient(float logit, int64_t c, int64_t t, float smoothing, float even) const {
    const float e = c == best ? 1.0f : expf(logit - greatest);
    const float less = c == best ? others : 1.0f + others - e;  // the probability is 1 - less / total
    return (c == t ? smoothing - less / (1.0f + others) : e / (1.0f + others)) - even;
  }
};

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

__device__ inline void store_score(Score score, Score* partial, float* loss, float* correct, double count) {
  score = sum_block(score);
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  if (gridDim.x == 1) {
    loss[0] = static_cast<float>(score.loss / count);
    if (correct != nullptr) correct[0] = static_cast<float>(score.correct);
  } else {
    partial[blockIdx.x] = score;
  }
}

static __global__ void merge_scores(const Score* partial, int64_t parts, float* loss, float* correct, double count) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) {
    score.loss += partial[i].loss;
    score.correct += partial[i].correct;
  }
  store_score(score, nullptr, loss, correct, count);
}

inline void merge(const Score* partial, int64_t parts, float* loss, float* correct, int64_t count, cudaStream_t stream) {
  if (parts > 1)
    MBC_LAUNCH(merge_scores, 1, THREADS, stream, partial, parts, loss, correct, static_cast<double>(count));
}

// The divisor of a mean: `sums` holds the weights and the number of all positions that count, over all ranks, of which
// this rank has the part `share`; nullptr: every position counts 1.
struct Mean {
  const float* sums;
  double share, positions;

  __device__ double divisor() const { return sums == nullptr ? positions : share * static_cast<double>(sums[0]); }
  __device__ double correct(double count) const {
    return sums == nullptr ? count : count * positions / (share * static_cast<double>(sums[1]));
  }
};

static __global__ void add_target_scores(const Score* partial, int64_t parts, float* loss, float* correct, Mean mean) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) {
    score.loss += partial[i].loss;
    score.correct += partial[i].correct;
  }
  score = sum_block(score);
  if (threadIdx.x != 0) return;
  loss[0] = static_cast<float>(score.loss / mean.divisor());
  if (correct != nullptr) correct[0] = static_cast<float>(mean.correct(score.correct));
}

}  // namespace mbc
