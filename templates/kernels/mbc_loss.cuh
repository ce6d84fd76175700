// A loss is summed in fp64 in two stages of fixed order: `parts` blocks leave a sum each, then one block adds them; with
// one part the first stage finishes by itself.
#pragma once

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

static __global__ void merge_scores(const Score* partial, int64_t parts, float* loss, float* correct, double count) {
  Score score{0.0, 0.0};
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) {
    score.loss += partial[i].loss;
    score.correct += partial[i].correct;
  }
  leave(score, nullptr, loss, correct, count);
}

inline void merge(const Score* partial, int64_t parts, float* loss, float* correct, int64_t count, cudaStream_t stream) {
  if (parts > 1)
    MBC_LAUNCH(merge_scores, 1, THREADS, stream, partial, parts, loss, correct, static_cast<double>(count));
}

}  // namespace mbc
