// Common parts of launchers: operands and arguments of a call, grid sizes, and launches: plain, with programmatic
// dependent launch, and in thread-block clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mbc_call.h"

// A translation unit that emulates a GPU defines its own way to launch.
#ifndef MBC_LAUNCH
#define MBC_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
// Launches with `bytes` of shared memory, which the kernel names by MBC_DYNAMIC_SHARED, in units of 16 bytes.
#define MBC_LAUNCH_SHARED(kernel, grid, block, bytes, stream, ...)                          \
  do {                                                                                       \
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);        \
    kernel<<<grid, block, bytes, stream>>>(__VA_ARGS__);                                     \
  } while (0)
#define MBC_DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif

// Launches a kernel that may start while the kernel before it in the stream ends (programmatic dependent launch): the
// earlier kernel calls `launch_dependents`, the later one `wait_for_prior_grid` before it reads its results.
#ifndef MBC_LAUNCH_NEXT
#ifdef MBC_EMULATED
#define MBC_LAUNCH_NEXT MBC_LAUNCH
#else
#define MBC_LAUNCH_NEXT(kernel, grid, block, stream, ...) mbc::launch_next(kernel, grid, block, stream, __VA_ARGS__)
#endif
#endif

// Launches a cluster of grid.y blocks for every grid.x, with distributed shared memory and programmatic dependent
// launch, from compute capability 9.0 on; on older GPUs grid.y is 1.
#ifndef MBC_LAUNCH_CLUSTER
#define MBC_LAUNCH_CLUSTER(kernel, grid, block, stream, ...) mbc::launch_cluster(kernel, grid, block, stream, __VA_ARGS__)
#define MBC_CLUSTER_SHARED(type, name) __shared__ type name
#endif

namespace mbc {

constexpr int THREADS = 256;

inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t multiprocessors() {
  static const int64_t count = [] {
    int device = 0, value = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value < 1 ? 1 : value;
  }();
  return multiprocessors_of_part > 0 ? multiprocessors_of_part : count;
}

// One wave: the blocks of a kernel that run at a time.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int shared_bytes) {
  int blocks = 1;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared_bytes));
  return multiprocessors() * (blocks < 1 ? 1 : blocks);
}

// Blocks of a grid-stride kernel over `items`: at most two full waves, so that the setup of a block is amortized.
inline unsigned blocks_for(int64_t items, int threads = THREADS) {
  const int64_t wanted = divide_up(items, threads), most = multiprocessors() * 16;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

inline const char* launched() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

template <typename Struct>
inline const Struct& arguments(const MbcCall& call) { return *reinterpret_cast<const Struct*>(call.integers); }
// The integers behind the structure.
template <typename Struct>
const int64_t* behind(const MbcCall& call) { return call.integers + sizeof(Struct) / sizeof(int64_t); }

inline float real(const MbcCall& call, int index) { return static_cast<float>(call.reals[index]); }

template <typename T>
inline const T* in(const MbcCall& call, int index) { return static_cast<const T*>(call.pointers[index]); }

template <typename T>
inline T* out(const MbcCall& call, int index) { return static_cast<T*>(call.pointers[index]); }

// An operand of a launch by its name in Python (`OwnKernel.operands`): a pointer of the type that its reader asks for.
struct Operand {
  void* pointer = nullptr;  // null: the launch has no such operand

  template <typename T>
  operator T*() const { return static_cast<T*>(pointer); }
  template <typename T>
  T* as() const { return static_cast<T*>(pointer); }
};
// Operands of one kind, one after another.
struct OperandList {
  void* const* pointers = nullptr;
  Operand operator[](int64_t i) const { return {pointers[i]}; }
};

// Defines the launcher of the kernel `name`, which calls a function of this file with the call and its operands by name.
#define MBC_LAUNCHER(name, ...)                                 \
  extern "C" const char* mbc_##name(const MbcCall& call) {      \
    using namespace mbc;                                        \
    return __VA_ARGS__(call, operands_of_##name(call));         \
  }

// Returns the error of a launcher whose operands are not aligned to 16 bytes, or null if they are.
inline const char* unaligned(const MbcCall& call) {
  for (int64_t i = 0; i < call.pointer_count; ++i)
    if (!aligned(call.pointers[i], 16)) return "operands must begin at multiples of 16 bytes";
  return nullptr;
}

// griddepcontrol.launch_dependents and griddepcontrol.wait (programmatic dependent launch).
__device__ inline void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_prior_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#ifndef MBC_EMULATED
inline bool overlaps_launches() {
  static const bool able = [] {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
  }();
  return able;
}

template <typename... Parameters, typename... Given>
void launch_with(int attributes, cudaLaunchAttribute* attribute, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                 cudaStream_t stream, const Given&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = overlaps_launches() ? attributes : 0;
  cudaLaunchKernelEx(&config, kernel, given...);
}

inline cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <typename Kernel, typename... Given>
void launch_next(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute attributes[]{programmatic_launch()};
  launch_with(1, attributes, kernel, grid, block, stream, given...);
}

template <typename Kernel, typename... Given>
void launch_cluster(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute attributes[]{{}, programmatic_launch()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 1;
  attributes[0].val.clusterDim.y = grid.y;
  attributes[0].val.clusterDim.z = 1;
  launch_with(2, attributes, kernel, grid, block, stream, given...);
}

// barrier.cluster: all blocks of a cluster arrive before any continues, and see what the others wrote before.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// mapa (distributed shared memory): the counterpart of `mine` in the shared memory of the cluster's block of this rank.
template <typename Shared>
__device__ inline const Shared& map_shared_rank(const Shared& mine, unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(&mine), "r"(rank));
  return *reinterpret_cast<const Shared*>(at);
#else
  return mine;
#endif
}
#endif

}  // namespace mbc
