// What every kernel of mbc shares: element types, vectors, walks over indices, launching.
//
// Conventions. All arithmetic is fp32 whatever the storage type; partial sums of different blocks meet in a second
// kernel in a fixed order (no atomics), so that equal inputs give equal bits. Nothing here allocates or waits: every
// launcher can be captured into a CUDA graph.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mbc_call.h"
#include "mbc_types.h"

// The working type of the plan; fp32 is always compiled beside it.
#ifndef MBC_WORKING
#define MBC_WORKING 0
#endif

#if MBC_WORKING == 1
using MbcWorking = __nv_bfloat16;
#elif MBC_WORKING == 2
using MbcWorking = __half;
#else
using MbcWorking = float;
#endif

// A translation unit that emulates a GPU brings its own way to launch.
#ifndef MBC_LAUNCH
#define MBC_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
// With `bytes` of shared memory, which the kernel names by MBC_DYNAMIC_SHARED, in units of 16 bytes.
#define MBC_LAUNCH_SHARED(kernel, grid, block, bytes, stream, ...)                          \
  do {                                                                                       \
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);        \
    kernel<<<grid, block, bytes, stream>>>(__VA_ARGS__);                                     \
  } while (0)
#define MBC_DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif

// The same for a kernel that may start while the one before it in the stream ends (programmatic dependent launch): the
// one before says `let_next_start`, this one `wait_for_previous` before it reads what that wrote.
#ifndef MBC_LAUNCH_NEXT
#ifdef MBC_EMULATED
#define MBC_LAUNCH_NEXT MBC_LAUNCH
#else
#define MBC_LAUNCH_NEXT(kernel, grid, block, stream, ...) mbc::launch_next(kernel, grid, block, stream, __VA_ARGS__)
#endif
#endif

// A cluster of grid.y blocks for every grid.x, which see each other's shared memory; likewise early. From compute
// capability 9.0; before it grid.y is 1.
#ifndef MBC_LAUNCH_CLUSTER
#define MBC_LAUNCH_CLUSTER(kernel, grid, block, stream, ...) mbc::launch_cluster(kernel, grid, block, stream, __VA_ARGS__)
#define MBC_CLUSTER_SHARED(type, name) __shared__ type name
#endif

// Runs the statement with `T` standing for the element type of `code`; leaves the launcher with a text otherwise.
#if MBC_WORKING == 0
#define MBC_FOR_TYPE(code, T, ...)                                        \
  do {                                                                    \
    if ((code) != MBC_FP32) return "element type is not in this library"; \
    using T = float;                                                      \
    __VA_ARGS__                                                           \
  } while (0)
#else
#define MBC_FOR_TYPE(code, T, ...)                   \
  do {                                               \
    if ((code) == MBC_FP32) {                        \
      using T = float;                               \
      __VA_ARGS__                                    \
    } else if ((code) == MBC_WORKING) {              \
      using T = MbcWorking;                          \
      __VA_ARGS__                                    \
    } else {                                         \
      return "element type is not in this library";  \
    }                                                \
  } while (0)
#endif

namespace mbc {

constexpr int THREADS = 256;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half(x); }

// N elements that are read or written at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <int N, typename T>
__device__ inline Vec<T, N> load(const T* at) { return *reinterpret_cast<const Vec<T, N>*>(at); }

template <int N, typename T>
__device__ inline void store(T* at, const Vec<T, N>& value) { *reinterpret_cast<Vec<T, N>*>(at) = value; }

template <int BYTES>
using Bits = std::conditional_t<BYTES == 1, uint8_t, std::conditional_t<BYTES == 2, uint16_t, uint32_t>>;

// The i-th element of a word.
template <typename T, typename Word>
__device__ inline T element_of(Word word, int i) {
  const auto bits = static_cast<Bits<sizeof(T)>>(word >> i * 8 * sizeof(T));
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// A vector that stays over a branch or a barrier: as words, since of small elements each would take a register.
template <typename T, int N>
struct alignas(sizeof(T) * N) Held {
  using Word = std::conditional_t<sizeof(T) * N % 4 == 0, uint32_t, Bits<sizeof(T)>>;
  static constexpr int IN_WORD = sizeof(Word) / sizeof(T), WORDS = N / IN_WORD;
  Word words[WORDS];

  __device__ T operator[](int j) const { return element_of<T>(words[j / IN_WORD], j % IN_WORD); }
};

template <int N, typename T>
__device__ inline Held<T, N> hold(const T* at) { return *reinterpret_cast<const Held<T, N>*>(at); }

// The elements of one word.
template <typename T>
__device__ inline uint32_t rounded_word(const float* x) {
  uint32_t word = 0;
#ifndef MBC_EMULATED
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
#endif
  constexpr int COUNT = sizeof(word) / sizeof(T);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const T value = from_float<T>(x[i]);
    Bits<sizeof(T)> bits;
    memcpy(&bits, &value, sizeof(bits));
    word |= uint32_t{bits} << i * 8 * sizeof(T);
  }
  return word;
}

// Rounded as they would be stored.
template <typename T, int N>
__device__ inline Held<T, N> rounded(const float (&x)[N]) {
  using Result = Held<T, N>;
  Result result;
#pragma unroll
  for (int w = 0; w < Result::WORDS; ++w) {
    if constexpr (sizeof(typename Result::Word) == sizeof(uint32_t)) {
      result.words[w] = rounded_word<T>(x + w * Result::IN_WORD);
    } else {
      const T value = from_float<T>(x[w]);
      memcpy(&result.words[w], &value, sizeof(value));
    }
  }
  return result;
}

// Sixteen bytes at once: behind a branch the compiler would store them in pieces.
template <int N, typename T>
__device__ inline void store_floats(T* at, const float (&x)[N]) {
  if constexpr (sizeof(T) * N == sizeof(uint4)) {
    constexpr int COUNT = N / 4;
    const uint4 words{rounded_word<T>(x), rounded_word<T>(x + COUNT), rounded_word<T>(x + 2 * COUNT),
                      rounded_word<T>(x + 3 * COUNT)};
#ifdef MBC_EMULATED
    *reinterpret_cast<uint4*>(at) = words;
#else
    __stwb(reinterpret_cast<uint4*>(at), words);
#endif
  } else {
    Vec<T, N> value;
#pragma unroll
    for (int j = 0; j < N; ++j) value.v[j] = from_float<T>(x[j]);
    store(at, value);
  }
}

// What was held, as it was.
template <typename T, int N>
__device__ inline void store_held(T* at, const Held<T, N>& value) {
  if constexpr (sizeof(value) == sizeof(uint4)) {
    const uint4 words{value.words[0], value.words[1], value.words[2], value.words[3]};
#ifdef MBC_EMULATED
    *reinterpret_cast<uint4*>(at) = words;
#else
    __stwb(reinterpret_cast<uint4*>(at), words);
#endif
  } else {
    *reinterpret_cast<Held<T, N>*>(at) = value;
  }
}

// Elements in 16 bytes.
template <typename T>
constexpr int WIDTH = 16 / static_cast<int>(sizeof(T));

inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t multiprocessors() {
  static const int64_t count = [] {
    int device = 0, value = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value < 1 ? 1 : value;
  }();
  return count;
}

// Blocks of a kernel that run at a time: more would leave part of the GPU idle at the end where each has as much to do.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int shared_bytes) {
  int blocks = 1;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared_bytes));
  return multiprocessors() * (blocks < 1 ? 1 : blocks);
}

// What was read before is on its way before anything is made of it: the compiler would put off each load until after the
// divisions that come before its first use.
__device__ inline void have_read() {
#ifdef __CUDA_ARCH__
  asm volatile("" ::: "memory");
#endif
}

__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_previous() {
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

inline cudaLaunchAttribute early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <typename Kernel, typename... Given>
void launch_next(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute attributes[]{early()};
  launch_with(1, attributes, kernel, grid, block, stream, given...);
}

template <typename Kernel, typename... Given>
void launch_cluster(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute attributes[]{{}, early()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 1;
  attributes[0].val.clusterDim.y = grid.y;
  attributes[0].val.clusterDim.z = 1;
  launch_with(2, attributes, kernel, grid, block, stream, given...);
}

// All blocks of a cluster have arrived before any of them goes on, and what they wrote before is there to be read.
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
// What another block of the cluster, by its place in it, has where this one has `mine` in shared memory.
template <typename Shared>
__device__ inline const Shared& of_block(const Shared& mine, unsigned place) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(&mine), "r"(place));
  return *reinterpret_cast<const Shared*>(at);
#else
  return mine;
#endif
}
#endif

// Blocks of a grid-stride kernel over `items`: two full waves at most, so that what a thread sets up is used often.
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

template <typename T>
inline const T* in(const MbcCall& call, int index) { return static_cast<const T*>(call.pointers[index]); }

template <typename T>
inline T* out(const MbcCall& call, int index) { return static_cast<T*>(call.pointers[index]); }

// What a launcher says where an operand does not begin at a multiple of 16 bytes.
inline const char* unaligned(const MbcCall& call) {
  for (int64_t i = 0; i < call.pointer_count; ++i)
    if (!aligned(call.pointers[i], 16)) return "operands have to begin at multiples of 16 bytes";
  return nullptr;
}

// A flat index taken apart as (outer, middle, inner), advanced by a fixed step without dividing again: three divisions
// an element would cost more than the memory traffic of the kernels that use it.
struct Steps {
  int64_t inner, middle;  // extents
  int64_t step_inner, step_middle, step_outer;

  Steps(int64_t inner_extent, int64_t middle_extent, int64_t step) : inner(inner_extent), middle(middle_extent) {
    step_inner = step % inner;
    step_middle = step / inner % middle;
    step_outer = step / inner / middle;
  }
};

struct Walk {
  int64_t inner, middle, outer;

  __device__ Walk(const Steps& steps, int64_t start) : inner(start), middle(0), outer(0) {
    if (start < steps.inner) return;
    if (start <= UINT32_MAX && steps.inner * steps.middle <= UINT32_MAX) {  // 32-bit divisions are far cheaper
      const uint32_t extent = static_cast<uint32_t>(steps.inner), rest = static_cast<uint32_t>(start) / extent;
      const uint32_t most = static_cast<uint32_t>(steps.middle);
      inner = static_cast<uint32_t>(start) - rest * extent;
      outer = rest / most;
      middle = rest - static_cast<uint32_t>(outer) * most;
    } else {
      inner = start % steps.inner;
      middle = start / steps.inner % steps.middle;
      outer = start / steps.inner / steps.middle;
    }
  }

  __device__ void advance(const Steps& steps) {
    inner += steps.step_inner;
    middle += steps.step_middle;
    outer += steps.step_outer;
    if (inner >= steps.inner) {
      inner -= steps.inner;
      ++middle;
    }
    if (middle >= steps.middle) {
      middle -= steps.middle;
      ++outer;
    }
  }
};

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// The upper half of a product of 128 bits.
__device__ inline uint64_t product_above(uint64_t a, uint64_t b) {
#ifdef MBC_EMULATED
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#else
  return __umul64hi(a, b);
#endif
}

// Channels of a wider tensor, read where they lie: `block` elements are adjacent, `gap` others come behind them. The
// division is by a reciprocal, right for all i with i * block below 2^64.
struct Slice {
  uint64_t reciprocal = 0;  // of the block, times 2^64; 0: of 1
  int64_t gap = 0;

  Slice() = default;
  // Of `channels` out of `all`.
  Slice(int64_t layout, int64_t channels, int64_t all, int64_t inner) {
    const bool last = layout == MBC_CHANNELS_LAST;
    reciprocal = UINT64_MAX / static_cast<uint64_t>(last ? channels : channels * inner) + 1;
    gap = (all - channels) * (last ? 1 : inner);
  }
  // Of the i-th element, from the slice's first one on.
  __device__ int64_t operator()(int64_t i) const {
    const auto index = static_cast<uint64_t>(i);
    return i + static_cast<int64_t>(reciprocal == 0 ? index : product_above(index, reciprocal)) * gap;
  }
};

// Threads of a block over [rows, columns] with the columns adjacent in memory: as many along the columns as are useful.
struct Tiling {
  unsigned along;    // threads along the columns, a power of two up to 32
  unsigned columns;  // blocks that cover the columns
  unsigned down() const { return THREADS / along; }

  explicit Tiling(int64_t column_count) : along(32) {
    while (along > 1 && along / 2 >= column_count) along /= 2;
    columns = static_cast<unsigned>(divide_up(column_count, along));
  }
};

}  // namespace mbc
