// Definitions of a generated program.cpp: the plan as tables, with one row for each launch.
#pragma once

#include "mbc_call.h"
#include "mbc_module.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

// A call that failed; the text names the function and includes the library's own explanation.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(status));
}

// A library whose calls are prepared once and then run many times (cuDNN, cuBLASLt).
class Library {
 public:
  virtual ~Library() = default;
  // Prepares the call that `integers` describe, for operands at these offsets of the arena (their alignment matters),
  // and returns its number. Equal calls are prepared once.
  virtual int prepare(const int64_t* integers, int64_t integer_count, const int64_t* offsets, int64_t offset_count) = 0;
  virtual void run(int number, const MbcCall& call) = 0;
};

class CudnnHandle;  // cudnn_calls.h

// The common objects of the libraries of one module; each is created by the first library that needs it.
struct Shared {
  std::shared_ptr<CudnnHandle> cudnn;
  const MbcRanks* ranks = nullptr;  // null if there is one GPU
};

std::unique_ptr<Library> open_cudnn(Shared& shared);         // convolution.cpp
std::unique_ptr<Library> open_cudnn_legacy(Shared& shared);  // legacy_convolution.cpp
std::unique_ptr<Library> open_cublaslt(Shared& shared);      // cublaslt.cpp
std::unique_ptr<Library> open_nccl(Shared& shared);          // nccl.cpp
size_t cudnn_version();                                      // cudnn_calls.cpp

constexpr int MBC_KERNEL = -1;  // `launch` is the launcher
constexpr int MBC_COPY = -2;    // a copy; integers: bytes

struct Launcher {
  const char* name;
  int library;  // MBC_KERNEL, MBC_COPY, or an index into PlanTables::libraries
  MbcLauncher launch;
};

// One row: launcher, stream, accesses, integers, reals, waits (four counts); then the offset of each access, the
// integers, and the launches to wait for. An offset below zero is -1 - offset in host memory, and MBC_PEER_BASE less
// than that in a peer's memory. Reals are in a pool of their own.
constexpr int ROW_HEADER = 6;
constexpr int64_t MBC_PEER_BASE = int64_t{1} << 62;

struct ProgramTable {
  int64_t launches;
  const int64_t* rows;
  const double* reals;
  const char* names;  // one for each launch, each ended by '\0'
};

struct PlanTables {
  uint64_t arena_bytes;
  uint64_t host_bytes;
  uint64_t peer_bytes;
  const Launcher* launchers;
  int64_t library_count;
  std::unique_ptr<Library> (*const* libraries)(Shared&);
  size_t (*cudnn_version)();  // null if the plan does not use cuDNN
  int64_t program_count;
  const ProgramTable* programs;  // in the order of MbcProgramIndex
};

extern const PlanTables mbc_plan;
