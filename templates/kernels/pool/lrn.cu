// Local response normalization across channels and its gradient: y = x / d^beta, d = k + alpha / size * (sum of x^2
// over the window). The window of channel c is [c - size / 2, c + (size - 1) / 2].
//
// Bytes      forward x in, y out; backward x and the gradient in, the gradient of x out.
// Kernels    channels first: a thread computes a run of 16 channels of a pixel with the window in registers (for the
//            usual size, 5). Channels last: neighbours in the window are neighbours in memory; the cache serves the
//            forward pass, shared memory the backward pass (1,024 elements of a block and up to 32 on either side).
//            Other sizes: each element computes its own window.
// Limit      memory bandwidth and exp2/log2 of each element.
#include "device.cuh"
#include "pooling_arguments.h"

namespace mbc {

constexpr int USUAL_SIZE = 5, RUN = 16, CHUNK = 1024, MOST_HALO = 32;

struct Lrn {
  int64_t channels, stride;  // stride: from a channel to the next
  int32_t before, after;     // the window: [c - before, c + after]
  float alpha_over_size, beta, k, slope;  // slope: 2 * alpha * beta / size

  __device__ float power(float d) const { return exp2f(-beta * log2f(d)); }

  template <typename T>
  __device__ float divisor(const T* x, int64_t at, int64_t c) const {
    float sum = 0.0f;
    const int64_t last = min(c + after, channels - 1);
    for (int64_t j = max(c - before, static_cast<int64_t>(0)); j <= last; ++j) {
      const float v = to_float(x[at + (j - c) * stride]);
      sum = fmaf(v, v, sum);
    }
    return fmaf(alpha_over_size, sum, k);
  }
};

// Elements one by one; `steps` gives the channel as `middle` (channels first) or `inner` (channels last).
template <typename T, bool LAST>
__global__ void lrn_direct(const T* x, T* y, int64_t elements, Steps steps, Lrn lrn) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < elements; i += stride, at.advance(steps)) {
    const float d = lrn.divisor(x, i, LAST ? at.inner : at.middle);
    y[i] = from_float<T>(to_float(x[i]) * lrn.power(d));
  }
}

template <typename T, bool LAST>
__global__ void lrn_backward_direct(const T* x, const T* dy, T* dx, int64_t elements, Steps steps, Lrn lrn) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < elements; i += stride, at.advance(steps)) {
    const int64_t c = LAST ? at.inner : at.middle, last = min(c + lrn.before, lrn.channels - 1);
    float shared = 0.0f, own = 0.0f;
    for (int64_t j = max(c - lrn.after, static_cast<int64_t>(0)); j <= last; ++j) {
      const int64_t e = i + (j - c) * lrn.stride;
      const float d = lrn.divisor(x, e, j), power = to_float(dy[e]) * lrn.power(d);
      shared += to_float(x[e]) * power / d;
      if (j == c) own = power;
    }
    dx[i] = from_float<T>(own - lrn.slope * to_float(x[i]) * shared);
  }
}

// Channels first: `columns` = rows * inner; a thread computes RUN channels of one column.
template <typename T, int SIZE>
__global__ void lrn_runs(const T* x, T* y, int64_t columns, int64_t inner, Lrn lrn) {
  constexpr int BEFORE = SIZE / 2, AFTER = (SIZE - 1) / 2;
  const int64_t column = thread_index();
  if (column >= columns) return;
  const int64_t n = column / inner, base = n * lrn.channels * inner + (column - n * inner);
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * RUN, end = min(begin + RUN, lrn.channels);
  auto at = [&](int64_t c) { return c >= 0 && c < lrn.channels ? to_float(x[base + c * inner]) : 0.0f; };
  float window[SIZE];
#pragma unroll
  for (int j = 1; j < SIZE; ++j) window[j] = at(begin - BEFORE + j - 1);
  for (int64_t c = begin; c < end; ++c) {
#pragma unroll
    for (int j = 1; j < SIZE; ++j) window[j - 1] = window[j];
    window[SIZE - 1] = at(c + AFTER);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) sum = fmaf(window[j], window[j], sum);
    y[base + c * inner] = from_float<T>(window[BEFORE] * lrn.power(fmaf(lrn.alpha_over_size, sum, lrn.k)));
  }
}

template <typename T, int SIZE>
__global__ void lrn_backward_runs(const T* x, const T* dy, T* dx, int64_t columns, int64_t inner, Lrn lrn) {
  constexpr int BEFORE = SIZE / 2, AFTER = (SIZE - 1) / 2;
  const int64_t column = thread_index();
  if (column >= columns) return;
  const int64_t n = column / inner, base = n * lrn.channels * inner + (column - n * inner);
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * RUN, end = min(begin + RUN, lrn.channels);
  auto at = [&](int64_t c) { return c >= 0 && c < lrn.channels ? to_float(x[base + c * inner]) : 0.0f; };
  // x of [j - BEFORE, j + AFTER]; dy * x * d^(-beta - 1) of [c - AFTER, c + BEFORE]; dy * d^-beta of [c, c + BEFORE];
  // where j = c + BEFORE leads.
  float window[SIZE], shared[SIZE] = {}, own[BEFORE + 1] = {};
#pragma unroll
  for (int i = 1; i < SIZE; ++i) window[i] = at(begin - AFTER - BEFORE + i - 1);
  for (int64_t j = begin - AFTER; j < end + BEFORE; ++j) {
#pragma unroll
    for (int i = 1; i < SIZE; ++i) window[i - 1] = window[i], shared[i - 1] = shared[i];
#pragma unroll
    for (int i = 1; i <= BEFORE; ++i) own[i - 1] = own[i];
    window[SIZE - 1] = at(j + AFTER);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sum = fmaf(window[i], window[i], sum);
    const float d = fmaf(lrn.alpha_over_size, sum, lrn.k);
    const bool inside = j >= 0 && j < lrn.channels;
    own[BEFORE] = inside ? to_float(dy[base + j * inner]) * lrn.power(d) : 0.0f;
    shared[SIZE - 1] = own[BEFORE] * window[BEFORE] / d;
    const int64_t c = j - BEFORE;
    if (c < begin) continue;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) total += shared[i];
    dx[base + c * inner] = from_float<T>(own[0] - lrn.slope * window[0] * total);
  }
}

// Channels last, backward: a block computes CHUNK adjacent elements; terms that their windows share are in shared
// memory.
template <typename T>
__global__ void lrn_backward_chunks(const T* x, const T* dy, T* dx, int64_t elements, int64_t chunks, Lrn lrn) {
  __shared__ float shared[CHUNK + 2 * MOST_HALO], own[CHUNK + 2 * MOST_HALO];
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t base = chunk * CHUNK, first = base % lrn.channels;
    for (int i = threadIdx.x; i < CHUNK + lrn.after + lrn.before; i += THREADS) {
      const int64_t e = base - lrn.after + i;
      float power = 0.0f, share = 0.0f;
      if (e >= 0 && e < elements) {
        const int64_t c = (first + lrn.channels * MOST_HALO - lrn.after + i) % lrn.channels;
        const float d = lrn.divisor(x, e, c);
        power = to_float(dy[e]) * lrn.power(d);
        share = to_float(x[e]) * power / d;
      }
      own[i] = power;
      shared[i] = share;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
      const int64_t e = base + i;
      if (e >= elements) break;
      const int64_t c = (first + i) % lrn.channels;
      const int32_t low = static_cast<int32_t>(min(static_cast<int64_t>(lrn.after), c));
      const int32_t high = static_cast<int32_t>(min(static_cast<int64_t>(lrn.before), lrn.channels - 1 - c));
      float total = 0.0f;
      for (int j = i + lrn.after - low; j <= i + lrn.after + high; ++j) total += shared[j];
      dx[e] = from_float<T>(own[i + lrn.after] - lrn.slope * to_float(x[e]) * total);
    }
    __syncthreads();
  }
}

inline Lrn lrn_of(const MbcCall& call, const LrnArguments& a) {
  const double alpha = call.reals[0], beta = call.reals[1], k = call.reals[2], size = static_cast<double>(a.size);
  return {a.channels,
          a.layout == MBC_CHANNELS_LAST ? 1 : a.inner,
          static_cast<int32_t>(a.size / 2),
          static_cast<int32_t>((a.size - 1) / 2),
          static_cast<float>(alpha / size),
          static_cast<float>(beta),
          static_cast<float>(k),
          static_cast<float>(2.0 * alpha * beta / size)};
}

inline dim3 run_grid(const LrnArguments& a) {
  return dim3(static_cast<unsigned>(divide_up(a.rows * a.inner, THREADS)),
              static_cast<unsigned>(divide_up(a.channels, RUN)));
}

}  // namespace mbc

extern "C" const char* mbc_lrn(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<LrnArguments>(call);
  const Lrn lrn = lrn_of(call, a);
  const int64_t elements = a.rows * a.channels * a.inner;
  const unsigned blocks = blocks_for(elements);
  const int64_t threads = static_cast<int64_t>(blocks) * THREADS;
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 1);
    if (a.layout == MBC_CHANNELS_LAST) {
      MBC_LAUNCH((lrn_direct<T, true>), blocks, THREADS, call.stream, x, y, elements, Steps(a.channels, 1, threads),
                 lrn);
    } else if (a.size == USUAL_SIZE) {
      MBC_LAUNCH((lrn_runs<T, USUAL_SIZE>), run_grid(a), THREADS, call.stream, x, y, a.rows * a.inner, a.inner, lrn);
    } else {
      MBC_LAUNCH((lrn_direct<T, false>), blocks, THREADS, call.stream, x, y, elements,
                 Steps(a.inner, a.channels, threads), lrn);
    }
  });
  return launched();
}

extern "C" const char* mbc_lrn_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<LrnArguments>(call);
  const Lrn lrn = lrn_of(call, a);
  const int64_t elements = a.rows * a.channels * a.inner, chunks = divide_up(elements, CHUNK);
  const unsigned blocks = blocks_for(elements);
  const int64_t threads = static_cast<int64_t>(blocks) * THREADS;
  MBC_FOR_TYPE(a.type, T, {
    const T *x = in<T>(call, 0), *dy = in<T>(call, 1);
    T* dx = out<T>(call, 2);
    if (a.layout == MBC_CHANNELS_LAST && lrn.before <= MOST_HALO) {
      MBC_LAUNCH((lrn_backward_chunks<T>), blocks_for(chunks, 1), THREADS, call.stream, x, dy, dx, elements, chunks,
                 lrn);
    } else if (a.layout == MBC_CHANNELS_LAST) {
      MBC_LAUNCH((lrn_backward_direct<T, true>), blocks, THREADS, call.stream, x, dy, dx, elements,
                 Steps(a.channels, 1, threads), lrn);
    } else if (a.size == USUAL_SIZE) {
      MBC_LAUNCH((lrn_backward_runs<T, USUAL_SIZE>), run_grid(a), THREADS, call.stream, x, dy, dx, a.rows * a.inner,
                 a.inner, lrn);
    } else {
      MBC_LAUNCH((lrn_backward_direct<T, false>), blocks, THREADS, call.stream, x, dy, dx, elements,
                 Steps(a.inner, a.channels, threads), lrn);
    }
  });
  return launched();
}
