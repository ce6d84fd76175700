// The rate of mma.sync.m16n8k16 in bf16 with sums in fp32 on this GPU, whose operands stay in registers: the peak of
// convolutions by mma.sync (posed_kernels.py). Eight independent products in each of eight warps hide the latency; two
// blocks for each multiprocessor fill the tensor cores, and 4 waves hide the end of the launch.
#include <cstdint>

#include <algorithm>

constexpr int CHAINS = 8, THREADS = 256, ROUNDS = 4096, BLOCKS_A_MULTIPROCESSOR = 8, REPEATS = 20;
constexpr double FLOP = 2.0 * 16 * 8 * 16;  // of one product

__global__ void __launch_bounds__(THREADS, 2) multiply(float* out) {
  float sums[CHAINS][4] = {};
  const uint32_t a[4] = {threadIdx.x, threadIdx.x + 1, threadIdx.x + 2, threadIdx.x + 3};
  const uint32_t b[2] = {threadIdx.x + 4, threadIdx.x + 5};
  for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
      float(&d)[4] = sums[chain];
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  float sum = 0;
  for (const auto& d : sums)
    for (const float one : d) sum += one;
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

// Returns TFLOP/s of the fastest of REPEATS launches, or minus the CUDA error.
extern "C" double mbc_mma_peak() {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int blocks = multiprocessors * BLOCKS_A_MULTIPROCESSOR;
  float *out = nullptr, best_ms = 1e30f;
  cudaMalloc(&out, sizeof(float) * blocks * THREADS);
  cudaEvent_t began, ended;
  cudaEventCreate(&began), cudaEventCreate(&ended);
  for (int repeat = 0; repeat < REPEATS; ++repeat) {
    float ms = 0;
    cudaEventRecord(began);
    multiply<<<blocks, THREADS>>>(out);
    cudaEventRecord(ended);
    cudaEventSynchronize(ended);
    cudaEventElapsedTime(&ms, began, ended);
    best_ms = std::min(best_ms, ms);
  }
  const cudaError_t error = cudaGetLastError();
  cudaEventDestroy(began), cudaEventDestroy(ended), cudaFree(out);
  return error == cudaSuccess ? FLOP * CHAINS * ROUNDS * blocks * (THREADS / 32) / (best_ms * 1e9) : -double(error);
}
