// Shared memory handed from one warp to another by an mbarrier, and back by a second one: what mbc's pipelines do, and
// nothing else. Each write happens before each read (PTX, memory consistency model): every lane arrives for itself, or,
// where the argument is `warp`, lane 0 for all, behind a __syncwarp. What racecheck reports here it reports of any such
// pipeline.
#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int ROUNDS = 64;

__device__ uint32_t shared_address(const void* of) { return static_cast<uint32_t>(__cvta_generic_to_shared(of)); }

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

template <bool WARP>
__device__ void release(uint64_t* barrier) {
  if (WARP) __syncwarp();
  if (!WARP || threadIdx.x % 32 == 0) arrive(barrier);
}

template <bool WARP>
__global__ void hand_over(int* sums) {
  __shared__ uint64_t full, empty;
  __shared__ int words[32];
  if (threadIdx.x == 0) {
    for (uint64_t* barrier : {&full, &empty})
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(WARP ? 1 : 32) : "memory");
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    if (threadIdx.x < 32) {
      wait(&empty, round % 2 ^ 1);  // a barrier's phase before its first counts as complete
      words[lane] = round + lane;
      release<WARP>(&full);
    } else {
      wait(&full, round % 2);
      sum += words[31 - lane];
      release<WARP>(&empty);
    }
  }
  if (threadIdx.x >= 32) sums[lane] = sum;
}

int main(int count, char** words) {
  int* sums;
  int found[32];
  cudaMalloc(&sums, sizeof found);
  const bool warp = count > 1 && std::strcmp(words[1], "warp") == 0;
  warp ? hand_over<true><<<1, 64>>>(sums) : hand_over<false><<<1, 64>>>(sums);
  if (cudaMemcpy(found, sums, sizeof found, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
  for (int lane = 0; lane < 32; ++lane)
    if (found[lane] != ROUNDS * (ROUNDS - 1) / 2 + ROUNDS * (31 - lane)) return 2;
  std::printf("each word was seen in each round\n");
}
