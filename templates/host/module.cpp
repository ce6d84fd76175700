// The C interface (mbc_module.h) over the tables of a plan (plan_tables.h). All networks take one path: a launch is a
// row.
#include "mbc_module.h"

#include "plan_tables.h"

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

constexpr int STREAMS = 7;   // compute, to_host, to_device, concurrent, collective, to_peer, from_peer
constexpr int COMPUTE = 0;

std::string creation_error;

// One launch, ready to run: its row with addresses, and the library call that belongs to it.
struct Launch {
  const Launcher* launcher;
  int stream;
  int prepared;  // number of the library's prepared call
  const int64_t* integers;
  int64_t integer_count;
  const double* reals;
  std::vector<void*> pointers;
  const int64_t* waits;
  int64_t wait_count;
  cudaEvent_t finished;  // recorded only if another stream waits for this launch
  const char* name;
};

class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Called with every node of a captured graph and the launch that added the node.
using NodeOfLaunch = std::function<void(size_t launch, cudaGraphNode_t node)>;

// The nodes of a graph during its capture, each with the launch that added it. The order of cudaGraphGetNodes is not
// documented, so that a node is new if it was not there before.
class CapturedNodes {
 public:
  void add_new(cudaStream_t stream, size_t launch) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph), "cudaStreamGetCaptureInfo");
    size_t count = 0;
    check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
    if (count == known_.size()) return;
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
    for (size_t i = count; i-- > 0 && known_.size() < count;)  // from the end, where new nodes are most likely
      if (known_.insert(nodes[i]).second) found_.emplace_back(launch, nodes[i]);
  }

  void tell(const NodeOfLaunch& report) const {
    for (const auto& [launch, node] : found_) report(launch, node);
  }

 private:
  std::unordered_set<cudaGraphNode_t> known_;
  std::vector<std::pair<size_t, cudaGraphNode_t>> found_;
};

// Addresses of the spaces of a plan: the arena, pinned host memory, memory of another GPU.
struct Spaces {
  char* arena;
  char* host;
  char* peer;

  // Returns the address of an offset in the form that rows have (plan_tables.h).
  void* address(int64_t offset) const {
    if (offset >= 0) return arena + offset;
    return offset > -1 - MBC_PEER_BASE ? host - 1 - offset : peer - 1 - (offset + MBC_PEER_BASE);
  }
};

class Program {
 public:
  Program(const ProgramTable& table, const Spaces& spaces, void* const* streams,
          const std::vector<std::unique_ptr<Library>>& libraries)
      : libraries_(libraries) {
    for (int i = 0; i < STREAMS; ++i) streams_[i] = static_cast<cudaStream_t>(streams[i]);
    const int64_t* row = table.rows;
    const double* reals = table.reals;
    const char* name = table.names;
    launches_.reserve(static_cast<size_t>(table.launches));
    for (int64_t i = 0; i < table.launches; ++i) {
      const int64_t accesses = row[2], integer_count = row[3], real_count = row[4], waits = row[5];
      const int64_t* offsets = row + ROW_HEADER;
      Launch launch{&mbc_plan.launchers[row[0]], static_cast<int>(row[1]), 0, offsets + accesses, integer_count, reals,
                    {}, offsets + accesses + integer_count, waits, nullptr, name};
      for (int64_t a = 0; a < accesses; ++a)
        launch.pointers.push_back(spaces.address(offsets[a]));
      if (launch.stream != COMPUTE) other_streams_[launch.stream] = true;
      for (int64_t w = 0; w < waits; ++w) {
        Launch& earlier = launches_[static_cast<size_t>(launch.waits[w])];
        if (earlier.finished != nullptr) continue;
        events_.push_back(std::make_unique<Event>());
        earlier.finished = events_.back()->get();
      }
      if (launch.launcher->library >= 0) {
        try {
          launch.prepared = libraries_[static_cast<size_t>(launch.launcher->library)]->prepare(
              launch.integers, integer_count, offsets, accesses);
        } catch (const std::exception& error) {
          throw Failure(described(i, launch, error));
        }
      }
      launches_.push_back(std::move(launch));
      row = offsets + accesses + integer_count + waits;
      reals += real_count;
      name += std::char_traits<char>::length(name) + 1;
    }
  }

  ~Program() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }

  // Runs launch by launch. `careful` waits for each one, so that an error is reported where it occurs. During a
  // capture, `nodes` records the nodes that each launch adds.
  void enqueue(bool careful, CapturedNodes* nodes = nullptr) {
    fork();
    for (size_t i = 0; i < launches_.size(); ++i) {
      run(i, careful);
      if (nodes != nullptr) nodes->add_new(streams_[COMPUTE], i);
    }
    join();
  }

  // Runs one launch and waits for it.
  void run_alone(int64_t index) {
    if (index < 0 || index >= static_cast<int64_t>(launches_.size()))
      throw Failure("there is no launch " + std::to_string(index));
    run(static_cast<size_t>(index), true);
  }

  int64_t size() const { return static_cast<int64_t>(launches_.size()); }

  void wait() const { check(cudaStreamSynchronize(streams_[COMPUTE]), "cudaStreamSynchronize"); }

  // `report`: called for each node; may be empty.
  void capture(const NodeOfLaunch& report) {
    if (executable_ != nullptr) return;
    CapturedNodes nodes;
    check(cudaStreamBeginCapture(streams_[COMPUTE], cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      enqueue(false, report ? &nodes : nullptr);
    } catch (...) {
      cudaStreamEndCapture(streams_[COMPUTE], &graph);  // leaves the streams usable; the first error is reported
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(streams_[COMPUTE], &graph), "cudaStreamEndCapture");
    nodes.tell(report);
    const cudaError_t status = cudaGraphInstantiateWithFlags(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
    check(cudaGraphUpload(executable_, streams_[COMPUTE]), "cudaGraphUpload");
    wait();
  }

  void replay() {
    if (executable_ == nullptr) throw Failure("the program was not captured: call mbc_capture first");
    check(cudaGraphLaunch(executable_, streams_[COMPUTE]), "cudaGraphLaunch");
  }

 private:
  static std::string described(int64_t index, const Launch& launch, const std::exception& error) {
    return "launch " + std::to_string(index) + ", " + launch.name + ": " + error.what();
  }

  void run(size_t index, bool careful) {
    const Launch& launch = launches_[index];
    try {
      start(launch);
      if (careful) check(cudaStreamSynchronize(streams_[launch.stream]), "while it ran");
    } catch (const std::exception& error) {
      throw Failure(described(static_cast<int64_t>(index), launch, error));
    }
  }

  void start(const Launch& launch) {
    const cudaStream_t stream = streams_[launch.stream];
    for (int64_t w = 0; w < launch.wait_count; ++w)
      check(cudaStreamWaitEvent(stream, launches_[static_cast<size_t>(launch.waits[w])].finished, 0),
            "cudaStreamWaitEvent");
    const MbcCall call{launch.pointers.data(), launch.integers, launch.reals, stream,
                       static_cast<int64_t>(launch.pointers.size()), launch.integer_count};
    const Launcher& launcher = *launch.launcher;
    if (launcher.library >= 0) {
      libraries_[static_cast<size_t>(launcher.library)]->run(launch.prepared, call);
    } else if (launcher.library == MBC_COPY) {
      check(cudaMemcpyAsync(call.pointers[1], call.pointers[0], static_cast<size_t>(call.integers[0]),
                            cudaMemcpyDefault, stream),
            "cudaMemcpyAsync");
    } else if (const char* text = launcher.launch(call)) {
      throw Failure(text);
    }
    if (launch.finished != nullptr) check(cudaEventRecord(launch.finished, stream), "cudaEventRecord");
  }

  // The other streams start after the work of the compute stream, which then waits for them. A capture needs both.
  void fork() {
    check(cudaEventRecord(forked_.get(), streams_[COMPUTE]), "cudaEventRecord");
    for (int i = 1; i < STREAMS; ++i)
      if (other_streams_[i]) check(cudaStreamWaitEvent(streams_[i], forked_.get(), 0), "cudaStreamWaitEvent");
  }

  void join() {
    for (int i = 1; i < STREAMS; ++i) {
      if (!other_streams_[i]) continue;
      check(cudaEventRecord(joined_[i].get(), streams_[i]), "cudaEventRecord");
      check(cudaStreamWaitEvent(streams_[COMPUTE], joined_[i].get(), 0), "cudaStreamWaitEvent");
    }
  }

  const std::vector<std::unique_ptr<Library>>& libraries_;
  cudaStream_t streams_[STREAMS] = {};
  bool other_streams_[STREAMS] = {};
  std::vector<Launch> launches_;
  std::vector<std::unique_ptr<Event>> events_;
  Event forked_;
  Event joined_[STREAMS];
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

struct MbcModule {
  MbcRanks ranks{};
  Shared shared;
  std::vector<std::unique_ptr<Library>> libraries;
  std::vector<std::unique_ptr<Program>> programs;
  std::string error;
};

namespace {

// Runs `body`; a failure becomes the text of `error` and the status 1, because no exception may be thrown into C.
template <typename Body>
int guarded(std::string& error, Body&& body) {
  try {
    body();
    error.clear();
    return 0;
  } catch (const std::exception& failure) {
    error = failure.what();
  } catch (...) {
    error = "unknown failure";
  }
  return 1;
}

// True if the training program has two halves, which replace it: it is neither warmed up nor captured itself.
bool is_cut(const MbcModule* module) { return module->programs.size() > MBC_BACKWARD; }

Program& program_of(MbcModule* module, int program) {
  if (program < 0 || program >= static_cast<int>(module->programs.size()))
    throw Failure("there is no program " + std::to_string(program));
  return *module->programs[static_cast<size_t>(program)];
}

}  // namespace

int mbc_abi_version() { return MBC_ABI_VERSION; }

size_t mbc_cudnn_version() { return mbc_plan.cudnn_version != nullptr ? mbc_plan.cudnn_version() : 0; }

uint64_t mbc_arena_bytes() { return mbc_plan.arena_bytes; }

void mbc_set_multiprocessors(int64_t count) { mbc::multiprocessors_of_part = count; }
uint64_t mbc_host_bytes() { return mbc_plan.host_bytes; }

uint64_t mbc_peer_bytes() { return mbc_plan.peer_bytes; }

int mbc_create(void* arena, uint64_t arena_bytes, void* host, uint64_t host_bytes, void* peer, uint64_t peer_bytes,
               void* const* streams, const MbcRanks* ranks, MbcModule** module) {
  *module = nullptr;
  return guarded(creation_error, [&] {
    if (arena_bytes < mbc_plan.arena_bytes)
      throw Failure("the arena has " + std::to_string(arena_bytes) + " bytes, the plan needs " +
                    std::to_string(mbc_plan.arena_bytes));
    if (host_bytes < mbc_plan.host_bytes)
      throw Failure("the host memory has " + std::to_string(host_bytes) + " bytes, the plan needs " +
                    std::to_string(mbc_plan.host_bytes));
    if (peer_bytes < mbc_plan.peer_bytes)
      throw Failure("the peer's memory has " + std::to_string(peer_bytes) + " bytes, the plan needs " +
                    std::to_string(mbc_plan.peer_bytes));
    if (reinterpret_cast<uintptr_t>(arena) % 256 != 0) throw Failure("the arena is not aligned to 256 bytes");
    auto created = std::make_unique<MbcModule>();
    if (ranks != nullptr) created->ranks = *ranks;
    created->shared.ranks = ranks != nullptr ? &created->ranks : nullptr;
    for (int64_t i = 0; i < mbc_plan.library_count; ++i) created->libraries.push_back(mbc_plan.libraries[i](created->shared));
    const Spaces spaces{static_cast<char*>(arena), static_cast<char*>(host), static_cast<char*>(peer)};
    for (int64_t i = 0; i < mbc_plan.program_count; ++i)
      created->programs.push_back(std::make_unique<Program>(mbc_plan.programs[i], spaces, streams, created->libraries));
    *module = created.release();
  });
}

int mbc_warm(MbcModule* module) {
  return guarded(module->error, [&] {
    for (size_t i = is_cut(module) ? MBC_INFER : MBC_TRAIN; i < module->programs.size(); ++i) {
      module->programs[i]->enqueue(true);
      module->programs[i]->wait();
    }
  });
}

int mbc_capture(MbcModule* module) { return mbc_capture_told(module, nullptr); }

int mbc_capture_told(MbcModule* module, MbcNodeOfLaunch tell) {
  return guarded(module->error, [&] {
    const bool cut = is_cut(module);
    for (size_t i = cut ? MBC_INFER : MBC_TRAIN; i < module->programs.size(); ++i) {
      const int program = cut && (i == MBC_FORWARD || i == MBC_BACKWARD) ? MBC_TRAIN : static_cast<int>(i);
      const int64_t before = cut && i == MBC_BACKWARD ? module->programs[MBC_FORWARD]->size() : 0;
      const NodeOfLaunch report = [=](size_t launch, cudaGraphNode_t node) {
        tell(program, before + static_cast<int64_t>(launch), node);
      };
      module->programs[i]->capture(tell != nullptr ? report : NodeOfLaunch{});
    }
  });
}

int mbc_run(MbcModule* module, int program) {
  return guarded(module->error, [&] {
    const bool whole = is_cut(module) && program == MBC_TRAIN;
    program_of(module, whole ? MBC_FORWARD : program).replay();
    if (whole) program_of(module, MBC_BACKWARD).replay();
  });
}

int mbc_run_eager(MbcModule* module, int program) {
  return guarded(module->error, [&] {
    program_of(module, program).enqueue(true);
    program_of(module, program).wait();
  });
}

int mbc_run_launch(MbcModule* module, int program, int64_t launch) {
  return guarded(module->error, [&] { program_of(module, program).run_alone(launch); });
}

const char* mbc_last_error(MbcModule* module) {
  return module != nullptr ? module->error.c_str() : creation_error.c_str();
}

void mbc_destroy(MbcModule* module) { delete module; }
