// The guard of a step whose gradients are clipped to a global L2 norm. It does what the guard of optimizer.cu does; if
// the norm of all gradients exceeds the limit, the divisor of the updates grows by the same ratio.
//
// Bytes      every gradient in, fp32, 16 bytes at a time where aligned.
// Tile       a gradient is cut into `parts`, one for each block; a launch takes up to `TENSORS` = 64 gradients, with a
//            row of blocks for each.
// Reduction  a block writes the sum of squares of its part in fp64, which no finite gradient overflows; one block adds
//            them in order. The number of parts depends only on the sizes, so that every GPU gets the same bits.
// Threads    256.
// Limit      memory bandwidth.
#include "guard.cuh"
#include "square_sums.cuh"
#include "clip_norm_arguments.h"
#include "clip_norm_operands.h"

namespace mbc {

constexpr double NORM_EPSILON = 1e-6;  // PyTorch's constant

struct GradientParts {
  const float* data[TENSORS];
  int64_t elements[TENSORS];
  int32_t parts[TENSORS];
  int64_t first[TENSORS];  // where the sums of a gradient's parts begin
};

__global__ void sum_squares(GradientParts gradients, double* sums) {
  const int n = static_cast<int>(blockIdx.y), parts = gradients.parts[n];
  if (static_cast<int>(blockIdx.x) >= parts) return;
  const float* data = gradients.data[n];
  const int64_t elements = gradients.elements[n], stride = static_cast<int64_t>(parts) * THREADS;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const bool wide = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t vectors = wide ? elements / 4 : 0;
  double sum = 0;
  for (int64_t i = start; i < vectors; i += stride) {
    const Vec<float, 4> v = load<4>(data + i * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += square(v.v[j]);
  }
  for (int64_t i = vectors * 4 + start; i < elements; i += stride) sum += square(data[i]);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) sums[gradients.first[n] + blockIdx.x] = sum;
}

__global__ void decide_clipped(const MbcControl* before, MbcControl* after, const float* loss, const double* sums,
                               int64_t parts, bool scaled, int64_t accumulate, double limit) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) sum += sums[i];
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  MbcControl control = decided(*before, isfinite(loss[0]) && isfinite(sum), scaled, accumulate);
  const double scale = static_cast<double>(control.gradient_scale), excess = (sqrt(sum) / scale + NORM_EPSILON) / limit;
  if (control.proceed != 0 && excess > 1.0) control.gradient_scale = static_cast<float>(scale * excess);
  *after = control;
}

__global__ void root_of_sum(const double* sums, int64_t parts, float* norm) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < parts; i += THREADS) sum += sums[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) norm[0] = static_cast<float>(sqrt(sum));
}

// The sums of squares of `count` gradients; `begin` is the number of the first pointer.
inline void sum_all_squares(cudaStream_t stream, OperandList all, int count, const int64_t* fields, double* sums) {
  int64_t first = 0;
  for (int done = 0; done < count; done += TENSORS) {
    GradientParts gradients{};
    const int some = count - done < TENSORS ? count - done : TENSORS;
    unsigned most = 1;
    for (int i = 0; i < some; ++i) {
      const int64_t* own = fields + (done + i) * 2;
      gradients.data[i] = all[done + i];
      gradients.elements[i] = own[0], gradients.parts[i] = static_cast<int32_t>(own[1]);
      gradients.first[i] = first;
      first += own[1];
      if (own[1] > most) most = static_cast<unsigned>(own[1]);
    }
    MBC_LAUNCH(sum_squares, dim3(most, static_cast<unsigned>(some)), THREADS, stream, gradients, sums);
  }
}

}  // namespace mbc

extern "C" const char* mbc_guard_clip_norm(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GuardArguments>(call);
  const auto at = operands_of_guard_clip_norm(call);
  double* sums = at.sums;
  const int64_t* fields = behind<GuardArguments>(call);
  sum_all_squares(call.stream, at.gradients, static_cast<int>(a.gradients), fields, sums);
  MBC_LAUNCH(decide_clipped, 1, THREADS, call.stream, at.control.as<MbcControl>(), at.written.as<MbcControl>(),
             at.loss.as<float>(), sums, a.parts, a.scaled != 0, a.accumulate, call.reals[0]);
  return launched();
}

// The norm of all operands together, which is then gathered from all ranks if each has parts of the gradients.
extern "C" const char* mbc_norm(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GuardArguments>(call);
  const auto at = operands_of_norm(call);
  double* sums = at.sums;
  const int64_t* fields = behind<GuardArguments>(call);
  sum_all_squares(call.stream, at.gradients, static_cast<int>(a.gradients), fields, sums);
  MBC_LAUNCH(root_of_sum, 1, THREADS, call.stream, sums, a.parts, at.norm.as<float>());
  return launched();
}
