// Blocks in which some warps fetch what others multiply on tensor cores, through a ring of stages in shared memory.
#pragma once

#include "wgmma.cuh"

namespace mbc {

constexpr int CONSUMERS = 2, PIPELINE_THREADS = (1 + CONSUMERS) * WARPGROUP;  // warpgroups; and one that copies
constexpr int PRODUCER_REGISTERS = 80, CONSUMER_REGISTERS = 208;  // 64 K in all, of which each starts with 168 a thread

// Where somebody is in a ring of which only so many stages are used, as is said at run time.
struct PipelineState {
  int32_t stage, phase = 0;

  __device__ void advance(int32_t by, int32_t stages) {
    stage += by;
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
  __device__ PipelineState behind(int32_t stages) const { return {stage + stages, phase}; }  // as long as the ring does not end
};

// The stages of a ring in shared memory, which some warps fill and others empty.
template <int STAGES>
struct Pipeline {
  Barrier full[STAGES], empty[STAGES];

  // By one thread; `arrivals` fill a stage, `multipliers` warpgroups empty it. Then all threads of the block have to
  // meet.
  __device__ void start(int arrivals, int consumers = CONSUMERS) {
    for (int s = 0; s < STAGES; ++s) {
      full[s].start(arrivals);
      empty[s].start(consumers * WARPGROUP / 32);
    }
    fence_mbarrier_init();
  }
  __device__ void consumer_wait(int32_t iteration) { full[iteration % STAGES].wait(iteration / STAGES % 2); }
  __device__ void producer_acquire(int32_t iteration) { empty[iteration % STAGES].wait(iteration / STAGES % 2 ^ 1); }
  __device__ void consumer_wait(const PipelineState& state) { full[state.stage].wait(state.phase); }
  __device__ void producer_acquire(const PipelineState& state) { empty[state.stage].wait(state.phase ^ 1); }
  // By all threads of a warp together.
  __device__ void consumer_release(int32_t iteration) {
    if (threadIdx.x % 32 == 0) empty[iteration % STAGES].arrive();
  }
  __device__ void consumer_release(const PipelineState& state) { consumer_release(state.stage); }
};

// Dynamic shared memory from a multiple of 1,024 bytes on, for which 1,008 are asked for beside.
__device__ inline char* aligned_shared(uint4* shared) {
  return reinterpret_cast<char*>(shared + (1024 - shared_address(shared) % 1024) % 1024 / 16);
}

}  // namespace mbc
