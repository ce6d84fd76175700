// Enough of CUDA to run the kernels of templates/kernels on a CPU: every thread of a block is a fiber, blocks run one
// after another, those of a cluster together. Threads run from the last to the first between two barriers, so that a
// missing barrier shows.
//
// A kernel is first tried without fibers, one thread after another; the first barrier ends that, and the launch starts
// again with them. No kernel writes its results before its first barrier, so nothing is done twice.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

#define MBC_EMULATED
#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another, and those of a cluster each have their own:
#define MBC_CLUSTER_SHARED(type, name)                           \
  static std::array<type, emulator::MOST_OF_CLUSTER> name##_of;  \
  type& name = name##_of[blockIdx.y]
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 16;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// Two: few blocks, so that every thread goes round its loop several times.
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 2, cudaSuccess; }
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 2, cudaSuccess;
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr unsigned WARP = 32, MOST_THREADS = 1024, MOST_OF_CLUSTER = 8;
constexpr size_t STACK_BYTES = 64 << 10;

constexpr uint64_t PARITY = uint64_t{1} << 63;  // of a barrier that counts

enum class State { READY, AT_CLUSTER_BARRIER, AT_BLOCK_BARRIER, AT_WARP_BARRIER, AT_PHASE, DONE };

struct Fiber {
  ucontext_t context;  // where it starts
  jmp_buf at;          // where it waits; jumping is far cheaper than swapping contexts
  bool started;
  State state;
  bool arrived;  // at the barrier of its cluster that it has not waited for yet
  dim3 index, block;
  unsigned exchanges;
  uint64_t words[2];  // what it gave in the last two exchanges of its warp
  uint32_t shown[2][6];
  const uint64_t* counter;  // at whose phase it waits, until its parity is another
  uint64_t parity;
};

struct NeedsFibers {};

inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
inline unsigned current;
inline bool alone;  // threads run without fibers
inline const std::function<void()>* body;
inline cudaError_t status = cudaSuccess;

// This thread, among others: threads that run one after another have no fibers.
inline Fiber& fiber() {
  if (alone) throw NeedsFibers{};
  return fibers[current];
}

inline void wait(State state) {
  fiber().state = state;
  if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}

// Until the phase of this parity has ended.
inline void wait_for_phase(const uint64_t& counter, uint32_t parity) {
  fiber().counter = &counter;
  fiber().parity = parity ? PARITY : 0;
  if ((counter & PARITY) == fiber().parity) wait(State::AT_PHASE);
}

// Lets threads go on whose phase has ended.
inline bool release_phases(unsigned threads) {
  bool any = false;
  for (unsigned t = 0; t < threads; ++t) {
    if (fibers[t].state != State::AT_PHASE || (*fibers[t].counter & PARITY) == fibers[t].parity) continue;
    fibers[t].state = State::READY;
    any = true;
  }
  return any;
}

inline void enter() {
  (*body)();
  wait(State::DONE);
}

inline void resume(unsigned t) {
  current = t;
  threadIdx = fibers[t].index;
  blockIdx = fibers[t].block;
  if (_setjmp(scheduler) != 0) return;
  if (fibers[t].started) _longjmp(fibers[t].at, 1);
  fibers[t].started = true;
  setcontext(&fibers[t].context);
}

inline unsigned block_threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Of a thread of its block.
inline dim3 index_of(unsigned t) {
  return dim3(t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y);
}

// Lets threads [first, last) go on when all of them that are not done wait in `state`.
inline bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned t = first; t < last; ++t) {
    if (fibers[t].state != State::DONE && fibers[t].state != state) return false;
    any = any || fibers[t].state == state;
  }
  for (unsigned t = first; t < last; ++t)
    if (fibers[t].state == state) fibers[t].state = State::READY;
  return any;
}

// `blocks` of them, one behind another along y, of which blockIdx is the first.
inline void run_blocks(unsigned blocks) {
  const unsigned each = block_threads(), threads = blocks * each;
  const dim3 first = blockIdx;
  fibers.resize(std::max<size_t>(fibers.size(), threads));
  stacks.resize(fibers.size() * STACK_BYTES);
  ucontext_t fresh;
  getcontext(&fresh);
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.context = fresh;
    fiber.context.uc_stack.ss_sp = stacks.data() + t * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.started = false;
    fiber.state = State::READY;
    fiber.arrived = false;
    fiber.exchanges = 0;
    fiber.index = index_of(t % each);
    fiber.block = dim3(first.x, first.y + t / each, first.z);
  }
  for (;;) {
    for (unsigned t = threads; t-- > 0;)
      if (fibers[t].state == State::READY) resume(t);
    bool any = release_phases(threads);
    any = release(0, threads, State::AT_CLUSTER_BARRIER) || any;
    for (unsigned block = 0; block < threads; block += each) {
      any = release(block, block + each, State::AT_BLOCK_BARRIER) || any;
      for (unsigned t = 0; t < each; t += WARP)
        any = release(block + t, block + std::min(t + WARP, each), State::AT_WARP_BARRIER) || any;
    }
    if (any) continue;
    for (unsigned t = 0; t < threads; ++t)
      if (fibers[t].state != State::DONE) status = 1;  // some threads wait for others that never come
    return;
  }
}

inline void run_block_alone() {
  for (unsigned t = block_threads(); t-- > 0;) {
    threadIdx = index_of(t);
    (*body)();
  }
}

// `cooperates`: whether threads of this kernel wait for one another, as far as is known; belongs to the place of launch.
// `cluster`: blocks of a cluster, along y.
inline void launch(dim3 grid, dim3 block, unsigned cluster, bool& cooperates, const std::function<void()>& kernel) {
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > MOST_THREADS || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 ||
      grid.y > 65535 || grid.z == 0 || grid.z > 65535 || cluster > MOST_OF_CLUSTER) {
    status = 9;
    return;
  }
  gridDim = grid;
  blockDim = block;
  body = &kernel;
  alone = !cooperates;
  try {
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; y += alone ? 1 : cluster)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = dim3(x, y, z);
          alone ? run_block_alone() : run_blocks(cluster);
        }
    body = nullptr;
  } catch (const NeedsFibers&) {
    cooperates = true;
    launch(grid, block, cluster, cooperates, kernel);
  }
}

}  // namespace emulator

#define MBC_LAUNCH_BLOCKS(kernel, grid, block, cluster, stream, ...)                                     \
  do {                                                                                                   \
    static bool cooperates = false;                                                                      \
    static_cast<void>(stream);                                                                           \
    emulator::launch(dim3(grid), dim3(block), cluster, cooperates, [&] { (kernel)(__VA_ARGS__); });      \
  } while (0)
#define MBC_LAUNCH(kernel, grid, block, stream, ...) MBC_LAUNCH_BLOCKS(kernel, grid, block, 1, stream, __VA_ARGS__)
#define MBC_LAUNCH_CLUSTER(kernel, grid, block, stream, ...) \
  MBC_LAUNCH_BLOCKS(kernel, grid, block, (grid).y, stream, __VA_ARGS__)

constexpr unsigned MOST_SHARED = 227 << 10;
#define MBC_DYNAMIC_SHARED(name) alignas(16) static uint4 name[MOST_SHARED / 16]
namespace emulator {
inline int most_shared_bytes = 0;  // that launches asked for since they were asked about
}
extern "C" __attribute__((used)) inline int mbc_emulated_shared_bytes() {
  return std::exchange(emulator::most_shared_bytes, 0);
}
#define MBC_LAUNCH_SHARED(kernel, grid, block, bytes, stream, ...)                   \
  do {                                                                               \
    emulator::most_shared_bytes = std::max(emulator::most_shared_bytes, (bytes));    \
    if ((bytes) > static_cast<int>(MOST_SHARED))                                     \
      emulator::status = 9;                                                          \
    else                                                                             \
      MBC_LAUNCH(kernel, grid, block, stream, __VA_ARGS__);                          \
  } while (0)

inline cudaError_t cudaGetLastError() {
  const cudaError_t status = emulator::status;
  emulator::status = cudaSuccess;
  return status;
}
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == 9 ? "invalid configuration argument" : "threads of a block wait at different barriers";
}

inline void __syncthreads() { emulator::wait(emulator::State::AT_BLOCK_BARRIER); }
inline void __syncwarp() { emulator::wait(emulator::State::AT_WARP_BARRIER); }
inline void cluster_arrive() { emulator::fiber().arrived = true; }
// A GPU would wait for ever for a thread that has not arrived.
inline void cluster_wait() {
  if (!emulator::fiber().arrived) emulator::status = 1;
  emulator::fiber().arrived = false;
  emulator::wait(emulator::State::AT_CLUSTER_BARRIER);
}
template <typename Shared>
const Shared& map_shared_rank(const Shared& mine, unsigned rank) {
  return *(&mine + (static_cast<int>(rank) - static_cast<int>(blockIdx.y)));
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  using namespace emulator;
  const unsigned self = current, slot = fiber().exchanges++ % 2;
  std::memcpy(&fibers[self].words[slot], &value, sizeof(T));
  wait(State::AT_WARP_BARRIER);
  T other;
  std::memcpy(&other, &fibers[self / WARP * WARP + static_cast<unsigned>(lane)].words[slot], sizeof(T));
  return other;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  return __shfl_sync(mask, value, static_cast<int>(emulator::current % emulator::WARP) ^ other);
}

namespace emulator {

// Six words of every thread of the warp, which all of them show at once.
class WarpWords {
 public:
  explicit WarpWords(const uint32_t (&mine)[6]) : first(current / WARP * WARP), slot(fiber().exchanges++ % 2) {
    std::memcpy(fibers[current].shown[slot], mine, sizeof(mine));
    wait(State::AT_WARP_BARRIER);
  }
  const uint32_t* of(unsigned lane) const { return fibers[first + lane].shown[slot]; }

 private:
  unsigned first, slot;
};

}  // namespace emulator
