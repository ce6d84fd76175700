// The bias of attention within windows: a row of a table for each offset of two pixels, and the mask of shifted windows.
//
// Bytes      the table or its gradient, a few KB; the bias or its gradient once.
// Threads    256. Forward: one thread for each element of the bias, in a grid-stride loop. Backward: a block for each
//            element of the table, which sums all pairs of pixels with that offset in a fixed order.
// Shared     1 KB.
// Limit      memory bandwidth forward, launch latency backward.
#include "device.cuh"
#include "window_bias_arguments.h"

namespace mbc {

constexpr float MASKED = -100.0f;

// The part of a shifted window that a coordinate belongs to.
__device__ inline int part_of(int64_t at, int64_t side, int64_t count, int64_t shift) {
  if (shift == 0) return 0;
  return (at >= side * (count - 1) ? 1 : 0) + (at >= side * count - shift ? 1 : 0);
}

template <typename T>
__global__ void make_window_bias(const T* table, T* y, WindowBiasArguments a, int64_t elements) {
  const int64_t pixels = a.height * a.width, windows = a.down * a.across;
  for (int64_t i = thread_index(); i < elements; i += thread_count()) {
    const int64_t key = i % pixels, query = i / pixels % pixels, window = i / pixels / pixels % windows;
    const int64_t head = i / pixels / pixels / windows;
    const int64_t y0 = query / a.width, x0 = query % a.width, y1 = key / a.width, x1 = key % a.width;
    const int64_t offset = (y0 - y1 + a.height - 1) * (2 * a.width - 1) + x0 - x1 + a.width - 1;
    const int64_t top = window / a.across * a.height, left = window % a.across * a.width;
    const bool near = part_of(top + y0, a.height, a.down, a.shift_down) == part_of(top + y1, a.height, a.down, a.shift_down) &&
                      part_of(left + x0, a.width, a.across, a.shift_across) == part_of(left + x1, a.width, a.across, a.shift_across);
    y[i] = from_float<T>(to_float(table[offset * a.heads + head]) + (near ? 0.0f : MASKED));
  }
}

template <typename T>
__global__ void sum_window_bias(const T* dy, float* dtable, WindowBiasArguments a) {
  __shared__ float shared[THREADS];
  const int64_t head = blockIdx.x % a.heads, offset = blockIdx.x / a.heads;
  const int64_t down = offset / (2 * a.width - 1) - (a.height - 1), across = offset % (2 * a.width - 1) - (a.width - 1);
  // Rows and columns of those keys whose query, at this offset, is inside the window, too.
  const int64_t rows = a.height - (down < 0 ? -down : down), columns = a.width - (across < 0 ? -across : across);
  const int64_t top = down < 0 ? -down : 0, left = across < 0 ? -across : 0;
  const int64_t pixels = a.height * a.width, windows = a.down * a.across;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < windows * rows * columns; i += THREADS) {
    const int64_t row = i / columns % rows + top, column = i % columns + left, window = i / columns / rows;
    const int64_t key = row * a.width + column, query = (row + down) * a.width + column + across;
    sum += to_float(dy[((head * windows + window) * pixels + query) * pixels + key]);
  }
  shared[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dtable[offset * a.heads + head] = shared[0];
}

}  // namespace mbc

extern "C" const char* mbc_window_bias(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WindowBiasArguments>(call);
  const int64_t pixels = a.height * a.width, elements = a.heads * a.down * a.across * pixels * pixels;
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((make_window_bias<T>), blocks_for(elements), THREADS, call.stream, in<T>(call, 0), out<T>(call, 1), a,
               elements);
  });
  return launched();
}

extern "C" const char* mbc_window_bias_backward(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<WindowBiasArguments>(call);
  const int64_t offsets = (2 * a.height - 1) * (2 * a.width - 1);
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((sum_window_bias<T>), static_cast<unsigned>(offsets * a.heads), THREADS, call.stream, in<T>(call, 0),
               out<float>(call, 1), a);
  });
  return launched();
}
