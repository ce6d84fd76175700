// Pipelines between warp-specialized warpgroups: producers copy operands into stages in shared memory, consumers issue
// the MMAs that read them.
#pragma once

#include "wgmma.cuh"

namespace mbc {

constexpr int CONSUMERS = 2, PIPELINE_THREADS = (1 + CONSUMERS) * WARPGROUP;  // consumer warpgroups; all with one producer
constexpr int PRODUCER_REGISTERS = 80, CONSUMER_REGISTERS = 208;  // 64 K registers in all; each thread starts with 168

// Stage and phase of a producer or consumer in a pipeline; `stages`, a run-time number, is how many stages are used.
struct PipelineState {
  int32_t stage, phase = 0;

  __device__ void advance(int32_t by, int32_t stages) {
    stage += by;
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
  __device__ PipelineState ahead(int32_t stages) const { return {stage + stages, phase}; }  // unless the pipeline wraps
};

// A pair of mbarriers for each stage: producers wait for `empty` and arrive at `full`, consumers the reverse.
template <int STAGES>
struct Pipeline {
  Barrier full[STAGES], empty[STAGES];

  // Run by one thread, before a barrier of the block; `arrivals` arrivals fill a stage, `consumers` warpgroups empty
  // it.
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
  // Run by all threads of a warp together, each of which may have read the stage by itself.
  __device__ void consumer_release(int32_t iteration) { consumer_release(PipelineState{iteration % STAGES}); }
  __device__ void consumer_release(const PipelineState& state) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[state.stage].arrive();
  }
};

// Dynamic shared memory from a multiple of 1,024 bytes on; the launch must ask for 1,008 bytes more.
__device__ inline char* aligned_shared(uint4* shared) {
  return reinterpret_cast<char*>(shared + (1024 - shared_address(shared) % 1024) % 1024 / 16);
}

}  // namespace mbc
