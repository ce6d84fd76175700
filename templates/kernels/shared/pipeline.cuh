// Blocks in which some warps fetch what others multiply on tensor cores, through a ring of stages in shared memory.
#pragma once

#include "wgmma.cuh"

namespace mbc {

constexpr int MULTIPLIERS = 2, RING_THREADS = (1 + MULTIPLIERS) * WARPGROUP;  // warpgroups; and one that copies
constexpr int COPIER_REGISTERS = 80, MULTIPLIER_REGISTERS = 208;  // 64 K in all, of which each starts with 168 a thread

// Where somebody is in a ring of which only so many stages are used, as is said at run time.
struct Turn {
  int32_t stage, phase = 0;

  __device__ void advance(int32_t by, int32_t stages) {
    stage += by;
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
  __device__ Turn behind(int32_t stages) const { return {stage + stages, phase}; }  // as long as the ring does not end
};

// The stages of a ring in shared memory, which some warps fill and others empty.
template <int STAGES>
struct Ring {
  Barrier filled[STAGES], emptied[STAGES];

  // By one thread; `arrivals` fill a stage, `multipliers` warpgroups empty it. Then all threads of the block have to
  // meet.
  __device__ void start(int arrivals, int multipliers = MULTIPLIERS) {
    for (int s = 0; s < STAGES; ++s) {
      filled[s].start(arrivals);
      emptied[s].start(multipliers * WARPGROUP / 32);
    }
    barriers_are_started();
  }
  __device__ void wait_until_filled(int32_t turn) { filled[turn % STAGES].wait(turn / STAGES % 2); }
  __device__ void wait_until_emptied(int32_t turn) { emptied[turn % STAGES].wait(turn / STAGES % 2 ^ 1); }
  __device__ void wait_until_filled(const Turn& turn) { filled[turn.stage].wait(turn.phase); }
  __device__ void wait_until_emptied(const Turn& turn) { emptied[turn.stage].wait(turn.phase ^ 1); }
  // By all threads of a warp together.
  __device__ void empty(int32_t turn) {
    if (threadIdx.x % 32 == 0) emptied[turn % STAGES].arrive();
  }
  __device__ void empty(const Turn& turn) { empty(turn.stage); }
};

// Dynamic shared memory from a multiple of 1,024 bytes on, for which 1,008 are asked for beside.
__device__ inline char* aligned_shared(uint4* shared) {
  return reinterpret_cast<char*>(shared + (1024 - shared_address(shared) % 1024) % 1024 / 16);
}

}  // namespace mbc
