// What a generated program.cpp defines: the plan as tables, one row a launch.
#pragma once

#include "mbc_call.h"
#include "mbc_module.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

// A call that failed; the text names the function and the library's own explanation.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(status));
}

// A library whose calls are readied once and then run many times (cuDNN, cuBLASLt).
class Library {
 public:
  virtual ~Library() = default;
  // Readies the call that `integers` describe, for operands at such offsets of the arena (their alignment matters);
  // returns its number. Equal calls are readied once.
  virtual int prepare(const int64_t* integers, int64_t integer_count, const int64_t* offsets, int64_t offset_count) = 0;
  virtual void run(int number, const MbcCall& call) = 0;
};

class CudnnHandle;  // cudnn_calls.h

// What the libraries of one module have in common; each part is made by the first that needs it.
struct Shared {
  std::shared_ptr<CudnnHandle> cudnn;
  const MbcRanks* ranks = nullptr;  // null where there is one GPU
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

// One row: launcher, stream, accesses, integers, reals, waits (four counts), then the offset of each access (below
// zero: -1 - offset in host memory, and MBC_PEER_BASE less than that in a peer's), the integers, and the launches to wait for. Reals lie in a pool of their own.
constexpr int ROW_HEADER = 6;
constexpr int64_t MBC_PEER_BASE = int64_t{1} << 62;

struct ProgramTable {
  int64_t launches;
  const int64_t* rows;
  const double* reals;
  const char* names;  // one a launch, each ended by '\0'
};

struct PlanTables {
  uint64_t arena_bytes;
  uint64_t host_bytes;
  uint64_t peer_bytes;
  const Launcher* launchers;
  int64_t library_count;
  std::unique_ptr<Library> (*const* libraries)(Shared&);
  size_t (*cudnn_version)();  // null where the plan does not use cuDNN
  int64_t program_count;
  const ProgramTable* programs;  // as MbcProgramIndex numbers them
};

extern const PlanTables mbc_plan;
