// ReLU's bit mask from its output, and ReLU's gradient by the mask. A byte holds eight channels of a pixel, at a
// stride of `inner` elements: 1 for channels last.
//
// Bytes      mask: the output in, one bit for each element out. Gradient: the gradient and the mask in, the gradient out.
// Threads    256 in a grid-stride loop, each with a byte of the mask at a time.
// Limit      memory bandwidth.
#include "device.cuh"
#include "relu_mask_arguments.h"

namespace mbc {

constexpr int EIGHT = 8;

// The index of the first of the eight elements of a byte.
template <bool ADJACENT>
__device__ inline int64_t first_of(int64_t byte, int64_t inner) {
  return ADJACENT ? byte * EIGHT : byte / inner * EIGHT * inner + byte % inner;
}

template <bool ADJACENT, typename T>
__device__ inline Vec<T, EIGHT> load_eight(const T* at, int64_t inner) {
  if constexpr (ADJACENT) {
    return load<EIGHT>(at);
  } else {
    Vec<T, EIGHT> elements;
#pragma unroll
    for (int j = 0; j < EIGHT; ++j) elements.v[j] = at[j * inner];
    return elements;
  }
}

template <bool ADJACENT, typename T>
__global__ void write_relu_mask(const T* y, uint8_t* relu_mask, int64_t bytes, int64_t inner) {
  for (int64_t i = thread_index(); i < bytes; i += thread_count()) {
    const Vec<T, EIGHT> values = load_eight<ADJACENT>(y + first_of<ADJACENT>(i, inner), inner);
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < EIGHT; ++j) bits |= static_cast<unsigned>(to_float(values.v[j]) > 0.0f) << j;
    relu_mask[i] = static_cast<uint8_t>(bits);
  }
}

// dy and dx may be the same bytes.
template <bool ADJACENT, typename T>
__global__ void relu_backward_mask(const T* dy, const uint8_t* relu_mask, T* dx, int64_t bytes, int64_t inner) {
  for (int64_t i = thread_index(); i < bytes; i += thread_count()) {
    const int64_t first = first_of<ADJACENT>(i, inner);
    Vec<T, EIGHT> values = load_eight<ADJACENT>(dy + first, inner);
    const unsigned bits = relu_mask[i];
#pragma unroll
    for (int j = 0; j < EIGHT; ++j)
      if (!(bits >> j & 1)) values.v[j] = from_float<T>(0.0f);
    if constexpr (ADJACENT) {
      store(dx + first, values);
    } else {
#pragma unroll
      for (int j = 0; j < EIGHT; ++j) dx[first + j * inner] = values.v[j];
    }
  }
}

}  // namespace mbc

extern "C" const char* mbc_relu_mask(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ReluMaskArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* y = in<T>(call, 0);
    auto* relu_mask = out<uint8_t>(call, 1);
    if (a.inner == 1 && aligned(y, sizeof(Vec<T, EIGHT>)))
      MBC_LAUNCH((write_relu_mask<true, T>), blocks_for(a.bytes), THREADS, call.stream, y, relu_mask, a.bytes, a.inner);
    else
      MBC_LAUNCH((write_relu_mask<false, T>), blocks_for(a.bytes), THREADS, call.stream, y, relu_mask, a.bytes, a.inner);
  });
  return launched();
}

extern "C" const char* mbc_relu_backward_masked(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ReluMaskArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* dy = in<T>(call, 0);
    const auto* relu_mask = in<uint8_t>(call, 1);
    T* dx = out<T>(call, 2);
    if (a.inner == 1 && aligned(dy, sizeof(Vec<T, EIGHT>)) && aligned(dx, sizeof(Vec<T, EIGHT>)))
      MBC_LAUNCH((relu_backward_mask<true, T>), blocks_for(a.bytes), THREADS, call.stream, dy, relu_mask, dx, a.bytes,
                 a.inner);
    else
      MBC_LAUNCH((relu_backward_mask<false, T>), blocks_for(a.bytes), THREADS, call.stream, dy, relu_mask, dx, a.bytes,
                 a.inner);
  });
  return launched();
}
