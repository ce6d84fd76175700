// Many tensors in few launches: the tensor and the elements that each block works on.
#pragma once

#include "optimizer.cuh"
#include "multi_tensor_arguments.h"

namespace mbc {

constexpr int MOST_TENSORS = 64;
constexpr int64_t CHUNK_ELEMENTS = 4 * 4 * THREADS;  // elements of a block: four vectors of four for each thread

// The tensor of a block, and its first element.
struct Chunks {
  uint32_t first[MOST_TENSORS + 1];  // block
  int64_t elements[MOST_TENSORS];

  __device__ int tensor() const {
    int low = 0;
#pragma unroll
    for (int half = MOST_TENSORS / 2; half > 0; half /= 2)
      if (first[low + half] <= blockIdx.x) low += half;
    return low;
  }
  __device__ int64_t begin(int tensor) const { return (blockIdx.x - first[tensor]) * CHUNK_ELEMENTS; }
  __device__ int64_t end(int tensor) const { return min(begin(tensor) + CHUNK_ELEMENTS, elements[tensor]); }
};

// Divides the tensors of a call among launches: `add(slot, number, fields)` adds a tensor, `launch(chunks, blocks)`
// launches.
template <int FIELDS, typename Add, typename Launch>
void for_each_launch(const int64_t* fields, int64_t tensors, Add add, Launch launch) {
  for (int64_t done = 0; done < tensors; done += MOST_TENSORS) {
    const int some = static_cast<int>(tensors - done < MOST_TENSORS ? tensors - done : MOST_TENSORS);
    Chunks chunks{};
    uint32_t blocks = 0;
    for (int i = 0; i < MOST_TENSORS; ++i) {
      chunks.first[i] = blocks;
      if (i >= some) {
        chunks.first[i] = UINT32_MAX;
        continue;
      }
      const int64_t* own = fields + (done + i) * FIELDS;
      chunks.elements[i] = own[0];
      blocks += static_cast<uint32_t>(divide_up(own[0], CHUNK_ELEMENTS));
      add(i, static_cast<int>(done) + i, own);
    }
    chunks.first[MOST_TENSORS] = UINT32_MAX;
    launch(chunks, blocks);
  }
}

// Applies `Rule` to this block's elements `begin` to `end` of a tensor. `more`: of `Tensor::wide`.
template <typename Rule>
__device__ inline void update_chunk(const Tensor& t, const Rule& rule, int64_t begin, int64_t end,
                                    uintptr_t more = 0) {
  const int64_t last = t.wide(more) ? end / 4 : begin / 4;
  update<Rule>(t, rule, begin / 4 + threadIdx.x, last, last * 4 + threadIdx.x, end, THREADS);
}

// Runs `kernel` of a rule on all tensors of a call: `add(all, slot, fields, at)` sets the operands of a tensor in `all`,
// where `at` returns a pointer of the call by its number.
template <int FIELDS, typename All, typename Settings, typename Add>
const char* run_updates(const MbcCall& call, void (*kernel)(Chunks, All, const MbcControl*, Settings),
                        const Settings& settings, Add add) {
  const auto& a = arguments<MultiTensorUpdateArguments>(call);
  const auto* control = in<MbcControl>(call, static_cast<int>(a.control));
  const auto at = [&](int64_t index) { return out<float>(call, static_cast<int>(index)); };
  All all{};
  for_each_launch<FIELDS>(
      behind<MultiTensorUpdateArguments>(call), a.tensors,
      [&](int slot, int, const int64_t* own) { add(all, slot, own, at); },
      [&](const Chunks& chunks, uint32_t blocks) {
        MBC_LAUNCH(kernel, blocks, THREADS, call.stream, chunks, all, control, settings);
      });
  return launched();
}

}  // namespace mbc
