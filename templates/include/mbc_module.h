// The C interface of a generated library: everything that Python calls. Every function that returns int returns 0 for
// success; otherwise mbc_last_error says what went wrong and in which operation.
#pragma once

#include <cstddef>
#include <cstdint>

#define MBC_ABI_VERSION 5

#if defined(_WIN32)
#define MBC_EXPORT extern "C" __declspec(dllexport)
#else
#define MBC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

struct MbcModule;  // opaque

// MBC_ACCUMULATE: of mini-batches whose gradients are only added up; where a step takes several of them.
enum MbcProgramIndex : int { MBC_TRAIN = 0, MBC_INFER = 1, MBC_ACCUMULATE = 2 };

// What NCCL is called by, where several GPUs share a mini-batch: its functions (those of copies are null where NCCL is
// too old for them), and a communicator of as many ranks as the plan was made for, of which this is number `rank`. Types
// are those of nccl.h, enumerations as int. Where a plan sums by copies the arena is a symmetric window of it.
struct MbcRanks {
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int operation, void* communicator,
                    void* stream);
  int (*all_to_all)(const void* from, void* to, size_t count, int type, void* communicator, void* stream);
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* communicator, void* stream);
  int (*reduce_scatter)(const void* from, void* to, size_t count, int type, int operation, void* communicator,
                        void* stream);
  int (*reduce)(const void* from, void* to, size_t count, int type, int operation, int root, void* communicator,
                void* stream);
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, void* communicator, void* stream);
  int (*async_error)(void* communicator, int* status);
  const char* (*error_string)(int status);
  int (*group_start)();
  int (*group_end)();
  void* communicator;
  int64_t rank;
  int64_t ranks;
};

MBC_EXPORT int mbc_abi_version();
// cuDNN's version as loaded (91900), 0 where the plan does not use cuDNN.
MBC_EXPORT size_t mbc_cudnn_version();
// Bytes of device memory, of pinned host memory and of another GPU's memory that the plan was made for.
MBC_EXPORT uint64_t mbc_arena_bytes();
MBC_EXPORT uint64_t mbc_host_bytes();
MBC_EXPORT uint64_t mbc_peer_bytes();
// How many multiprocessors launches are sized for, where streams are limited to a part of the GPU; 0: all. Before
// mbc_create.
MBC_EXPORT void mbc_set_multiprocessors(int64_t count);
// `streams`: compute, to_host, to_device, concurrent, collective, to_peer, from_peer: handles of streams of the current
// context. `host`: pinned memory, or null where mbc_host_bytes() is 0. `peer`: memory of another GPU that the current
// context has peer access to, likewise. `ranks`: null for one GPU. The library owns neither memory nor streams nor
// communicator; they must outlive the module.
MBC_EXPORT int mbc_create(void* arena, uint64_t arena_bytes, void* host, uint64_t host_bytes, void* peer,
                          uint64_t peer_bytes, void* const* streams, const MbcRanks* ranks, MbcModule** module);
// Runs every launch of all programs once, one by one, each waited for: loads kernels and finds errors where they
// happen. It writes all over the arena; states are written afterwards.
MBC_EXPORT int mbc_warm(MbcModule* module);
// Captures all programs into executable graphs, and uploads them.
MBC_EXPORT int mbc_capture(MbcModule* module);
// The same, and tells which launch of which program each node (a cudaGraphNode_t) of the captured graphs belongs to,
// before executable graphs are made of them.
typedef void (*MbcNodeOfLaunch)(int program, int64_t launch, void* node);
MBC_EXPORT int mbc_capture_told(MbcModule* module, MbcNodeOfLaunch tell);
// Replays the captured program on the compute stream; does not wait.
MBC_EXPORT int mbc_run(MbcModule* module, int program);
// Runs the program launch by launch on the plan's streams, without a graph; waits, checking after each launch.
MBC_EXPORT int mbc_run_eager(MbcModule* module, int program);
// Runs one launch of the program on its stream and waits for it; those before it have to be over.
MBC_EXPORT int mbc_run_launch(MbcModule* module, int program, int64_t launch);
// The last failure of `module`, or of mbc_create where it is null; "" when there was none.
MBC_EXPORT const char* mbc_last_error(MbcModule* module);
MBC_EXPORT void mbc_destroy(MbcModule* module);
