// End of a step: the guard (the step is skipped if a gradient is infinite or NaN; the dynamic loss scale of fp16). The
// control block is updated in place.
//
// Bytes      every gradient in, fp32, 16 bytes at a time if aligned.
// Threads    256 in a grid-stride loop; up to 64 tensors in a launch, with a row of blocks for each.
// Limit      memory bandwidth.
#include "guard.cuh"
#include "clip_norm_arguments.h"
#include "optimizer_operands.h"

namespace mbc {

struct Tensors {
  const float* data[TENSORS];
  int64_t elements[TENSORS];
};

__global__ void clear_flag(uint32_t* flag) { *flag = 0; }

// A row of blocks for each tensor. Every block that finds an infinity or NaN writes the same value, in any order.
__global__ void find_nonfinite(Tensors tensors, uint32_t* flag) {
  const float* data = tensors.data[blockIdx.y];
  const int64_t elements = tensors.elements[blockIdx.y], stride = thread_count();
  const bool wide = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t vectors = wide ? elements / 4 : 0;
  bool finite = true;
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    const Vec<float, 4> v = load<4>(data + i * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) finite = finite && isfinite(v.v[j]);
  }
  for (int64_t i = vectors * 4 + thread_index(); i < elements; i += stride) finite = finite && isfinite(data[i]);
  if (!finite) *flag = 1;
}

__global__ void decide(const MbcControl* before, MbcControl* after, const float* loss, const uint32_t* flag,
                       bool scaled, int64_t accumulate) {
  *after = decided(*before, isfinite(loss[0]) && (flag == nullptr || *flag == 0), scaled, accumulate);
}

// A thread for each byte. Without a loss this is a copy.
__global__ void check_loss(const uint8_t* before, uint8_t* after, const float* loss) {
  after[threadIdx.x] = before[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0 && loss != nullptr) reinterpret_cast<MbcControl*>(after)->proceed = isfinite(loss[0]) ? 1 : 0;
}

}  // namespace mbc

extern "C" const char* mbc_guard(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<GuardArguments>(call);
  const int64_t* elements = behind<GuardArguments>(call);
  const int count = static_cast<int>(a.gradients);
  const auto at = operands_of_guard(call);
  uint32_t* flag = at.flag;
  if (count > 0) MBC_LAUNCH(clear_flag, 1, 1, call.stream, flag);
  for (int done = 0; done < count; done += TENSORS) {
    Tensors tensors{};
    const int some = count - done < TENSORS ? count - done : TENSORS;
    int64_t most = 0;
    for (int i = 0; i < some; ++i) {
      tensors.data[i] = at.gradients[done + i];
      tensors.elements[i] = elements[done + i];
      if (elements[done + i] > most) most = elements[done + i];
    }
    const int64_t wanted = divide_up(most, THREADS * 4 * 4), cap = multiprocessors();
    const dim3 grid(static_cast<unsigned>(wanted < cap ? wanted : cap), static_cast<unsigned>(some));
    MBC_LAUNCH(find_nonfinite, grid, THREADS, call.stream, tensors, flag);
  }
  MBC_LAUNCH(decide, 1, 1, call.stream, at.control.as<MbcControl>(), at.written.as<MbcControl>(), at.loss.as<float>(),
             flag, a.scaled != 0, a.accumulate);
  return launched();
}

// Copies the control block, except that `proceed` says whether the loss of one mini-batch is finite.
extern "C" const char* mbc_check_loss(const MbcCall& call) {
  using namespace mbc;
  MBC_LAUNCH(check_loss, 1, CONTROL_BYTES, call.stream, in<uint8_t>(call, 0), out<uint8_t>(call, 2), in<float>(call, 1));
  return launched();
}

extern "C" const char* mbc_copy_control(const MbcCall& call) {
  using namespace mbc;
  MBC_LAUNCH(check_loss, 1, CONTROL_BYTES, call.stream, in<uint8_t>(call, 0), out<uint8_t>(call, 1), nullptr);
  return launched();
}
