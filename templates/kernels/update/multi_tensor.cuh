// Many tensors in few launches: the tensor and the elements that each block works on.
#pragma once

#include "device.cuh"

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

}  // namespace mbc
