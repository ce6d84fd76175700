// The C interface of a generated library: everything that Python calls. A function that returns int returns 0 for
// success; otherwise mbc_last_error describes the failure and names the operation.
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

// MBC_ACCUMULATE: for mini-batches whose gradients are only added up, if a step takes several mini-batches. MBC_FORWARD
// and MBC_BACKWARD: the halves of a training program that is cut; together they have its launches, in its order. MBC_ADD:
// the second half for mini-batches whose gradients are only added up.
enum MbcProgramIndex : int { MBC_TRAIN, MBC_INFER, MBC_ACCUMULATE, MBC_FORWARD = 2, MBC_BACKWARD, MBC_ADD };

// NCCL's functions and communicator, if several GPUs share a mini-batch. The functions for copies are null if NCCL is
// too old for them. The communicator has as many ranks as the plan, of which this process is number `rank`. Types are
// those of nccl.h, with enumerations as int. If a plan sums by copies, the arena is a symmetric window of the
// communicator.
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
// Version of the loaded cuDNN (91900), 0 if the plan does not use cuDNN.
MBC_EXPORT size_t mbc_cudnn_version();
// Bytes of device memory, of pinned host memory and of another GPU's memory that the plan uses.
MBC_EXPORT uint64_t mbc_arena_bytes();
MBC_EXPORT uint64_t mbc_host_bytes();
MBC_EXPORT uint64_t mbc_peer_bytes();
// Sets the number of multiprocessors that launches are sized for, if streams are limited to a part of the GPU; 0: all.
// Must be called before mbc_create.
MBC_EXPORT void mbc_set_multiprocessors(int64_t count);
// `streams`: compute, to_host, to_device, concurrent, collective, to_peer, from_peer: handles of streams of the current
// context. `host`: pinned memory, or null if mbc_host_bytes() is 0. `peer`: memory of another GPU that the current
// context has peer access to, or null if mbc_peer_bytes() is 0. `ranks`: null for one GPU. The library owns neither
// memory nor streams nor communicator; they must outlive the module.
MBC_EXPORT int mbc_create(void* arena, uint64_t arena_bytes, void* host, uint64_t host_bytes, void* peer,
                          uint64_t peer_bytes, void* const* streams, const MbcRanks* ranks, MbcModule** module);
// Runs every launch of all programs once, one by one, and waits for each: this loads kernels and reports errors where
// they occur. It overwrites the whole arena; states must be written afterwards.
MBC_EXPORT int mbc_warm(MbcModule* module);
// Captures all programs as executable graphs, and uploads them. Of a training program that is cut, the halves are
// captured, which mbc_run replays one after the other; they count as parts of MBC_TRAIN in mbc_capture_told.
MBC_EXPORT int mbc_capture(MbcModule* module);
// Captures all programs, too, and reports for each node (a cudaGraphNode_t) of the captured graphs which launch of
// which program added it, before executable graphs are created.
typedef void (*MbcNodeOfLaunch)(int program, int64_t launch, void* node);
MBC_EXPORT int mbc_capture_told(MbcModule* module, MbcNodeOfLaunch tell);
// Replays the captured program on the compute stream; does not wait.
MBC_EXPORT int mbc_run(MbcModule* module, int program);
// Runs the program launch by launch on the plan's streams, without a graph; waits for each launch and checks it.
MBC_EXPORT int mbc_run_eager(MbcModule* module, int program);
// Runs one launch of the program on its stream and waits for it; earlier launches must have ended.
MBC_EXPORT int mbc_run_launch(MbcModule* module, int program, int64_t launch);
// The last failure of `module`, or of mbc_create if `module` is null; "" if there was none.
MBC_EXPORT const char* mbc_last_error(MbcModule* module);
MBC_EXPORT void mbc_destroy(MbcModule* module);
