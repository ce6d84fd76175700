// Times what captured CUDA graphs run on the GPU, node by node, by CUPTI's activity records. A process has one
// recorder, because CUPTI has one subscriber.
//
// CUPTI, https://docs.nvidia.com/cupti/api/group__CUPTI__ACTIVITY__API.html: the record of a kernel, copy or fill that
// a graph launched has the id of its node. During the capture of a graph, the module reports the launch of each node
// (mbc_recorder_node, an MbcNodeOfLaunch of mbc_module.h). An executable graph may have clones of those nodes with
// their own ids; CUPTI reports the original of each clone.
#include <cupti.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define MBC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Records grow at their end from one version of CUPTI to the next. The versions used here have every field that is
// read, and the headers of CUDA 12.4 to 13 define them.
using KernelRecord = CUpti_ActivityKernel9;
using CopyRecord = CUpti_ActivityMemcpy5;
using PeerCopyRecord = CUpti_ActivityMemcpyPtoP4;
using FillRecord = CUpti_ActivityMemset4;

constexpr CUpti_ActivityKind KINDS[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET};
constexpr size_t BUFFER_BYTES = 4 << 20;
constexpr size_t BUFFER_ALIGNMENT = 8;  // alignment of records

// One run of one node; mbc/record/recorder.py reads it. `call`: the graph launch that ran the node; `launch`: of
// `program`, -1 if the module reported none.
struct Event {
  int64_t start_ns;
  int64_t end_ns;
  int64_t call;
  int64_t node;
  int64_t launch;
  int64_t program;
  int64_t graph;
  int64_t stream;
  int64_t name;
};

struct Owner {
  int program;
  int64_t launch;
};

struct Recorder {
  std::mutex lock;  // CUPTI's worker threads deliver records
  CUpti_SubscriberHandle subscriber = nullptr;
  std::unordered_map<uint64_t, Owner> owners;        // by node
  std::unordered_map<uint64_t, uint64_t> originals;  // by clone
  std::vector<Event> events;
  std::unordered_map<std::string, int64_t> numbers;  // of names
  std::vector<std::string> names;
  uint64_t dropped = 0;
  CUptiResult status = CUPTI_SUCCESS;  // the first failure
  std::string failure;

  bool check(CUptiResult result, const char* call) {
    if (result == CUPTI_SUCCESS) return true;
    if (status == CUPTI_SUCCESS) {
      const char* text = nullptr;
      cuptiGetResultString(result, &text);
      status = result;
      failure = std::string(call) + ": " + (text != nullptr ? text : "no reason given");
    }
    return false;
  }

  int64_t number(const char* name) {
    const auto [place, is_new] = numbers.emplace(name, static_cast<int64_t>(names.size()));
    if (is_new) names.push_back(name);
    return place->second;
  }

  const Owner* owner(uint64_t node) const {
    for (size_t step = 0; step <= originals.size(); ++step) {
      const auto match = owners.find(node);
      if (match != owners.end()) return &match->second;
      const auto original = originals.find(node);
      if (original == originals.end()) return nullptr;
      node = original->second;
    }
    return nullptr;
  }
};

Recorder recorder;

std::string demangled(const std::string& name) {
  if (name.rfind("_Z", 0) != 0) return name;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string description = text != nullptr ? text : name;
  std::free(text);
  return description;
}

const char* copy_name(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "memcpy HtoD";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "memcpy DtoH";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "memcpy DtoD";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "memcpy PtoP";
    default: return "memcpy";
  }
}

// Work outside of graphs (the warm-up, inputs, figures) belongs to no node.
template <typename Record>
void keep(const Record& record, const char* name) {
  if (record.graphNodeId == 0) return;
  recorder.events.push_back(Event{static_cast<int64_t>(record.start), static_cast<int64_t>(record.end),
                                  record.correlationId, static_cast<int64_t>(record.graphNodeId), -1, -1,
                                  record.graphId, record.streamId, recorder.number(name)});
}

void take(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& kernel = *reinterpret_cast<const KernelRecord*>(record);
      keep(kernel, kernel.name != nullptr ? kernel.name : "kernel");
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& copy = *reinterpret_cast<const CopyRecord*>(record);
      keep(copy, copy_name(copy.copyKind));
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto& copy = *reinterpret_cast<const PeerCopyRecord*>(record);
      keep(copy, copy_name(copy.copyKind));
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET:
      keep(*reinterpret_cast<const FillRecord*>(record), "memset");
      break;
    default:
      break;
  }
}

void CUPTIAPI request_buffer(uint8_t** buffer, size_t* bytes, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(BUFFER_ALIGNMENT, BUFFER_BYTES));
  *bytes = *buffer != nullptr ? BUFFER_BYTES : 0;
  *most_records = 0;  // as many as fit
}

void CUPTIAPI complete_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid_bytes) {
  const std::lock_guard<std::mutex> guard(recorder.lock);
  CUpti_Activity* record = nullptr;
  while (valid_bytes > 0) {
    const CUptiResult status = cuptiActivityGetNextRecord(buffer, valid_bytes, &record);
    if (status == CUPTI_ERROR_MAX_LIMIT_REACHED) break;  // that was the last record
    if (!recorder.check(status, "cuptiActivityGetNextRecord")) break;
    take(record);
  }
  size_t dropped = 0;
  if (recorder.check(cuptiActivityGetNumDroppedRecords(context, stream, &dropped), "cuptiActivityGetNumDroppedRecords"))
    recorder.dropped += dropped;
  std::free(buffer);
}

void CUPTIAPI on_clone(void*, CUpti_CallbackDomain, CUpti_CallbackId id, const void* data) {
  if (id != CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED) return;
  const auto& graph = *static_cast<const CUpti_GraphData*>(static_cast<const CUpti_ResourceData*>(data)->resourceDescriptor);
  uint64_t clone = 0, original = 0;
  const CUptiResult of_clone = cuptiGetGraphNodeId(graph.node, &clone);
  const CUptiResult of_original = cuptiGetGraphNodeId(graph.originalNode, &original);
  const std::lock_guard<std::mutex> guard(recorder.lock);
  if (recorder.check(of_clone, "cuptiGetGraphNodeId") && recorder.check(of_original, "cuptiGetGraphNodeId") &&
      clone != original)
    recorder.originals[clone] = original;
}

}  // namespace

// These return a CUptiResult, 0 for success; mbc_recorder_failure names the first call that failed, and its error.

// Records all graphs from now on. Must be called before the graphs are created.
MBC_EXPORT int mbc_recorder_open() {
  recorder.check(cuptiSubscribe(&recorder.subscriber, on_clone, nullptr), "cuptiSubscribe") &&
      recorder.check(cuptiEnableCallback(1, recorder.subscriber, CUPTI_CB_DOMAIN_RESOURCE,
                                         CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED),
                     "cuptiEnableCallback") &&
      recorder.check(cuptiActivityRegisterCallbacks(request_buffer, complete_buffer), "cuptiActivityRegisterCallbacks");
  for (const CUpti_ActivityKind kind : KINDS)
    if (recorder.status == CUPTI_SUCCESS) recorder.check(cuptiActivityEnable(kind), "cuptiActivityEnable");
  return recorder.status;
}

// An MbcNodeOfLaunch.
MBC_EXPORT void mbc_recorder_node(int program, int64_t launch, void* node) {
  uint64_t id = 0;
  const CUptiResult status = cuptiGetGraphNodeId(static_cast<CUgraphNode>(node), &id);
  const std::lock_guard<std::mutex> guard(recorder.lock);
  if (recorder.check(status, "cuptiGetGraphNodeId")) recorder.owners[id] = Owner{program, launch};
}

// Stops recording and assigns every event to its launch; the GPU must be idle.
MBC_EXPORT int mbc_recorder_stop() {
  recorder.check(cuptiActivityFlushAll(0), "cuptiActivityFlushAll");
  for (const CUpti_ActivityKind kind : KINDS) recorder.check(cuptiActivityDisable(kind), "cuptiActivityDisable");
  const std::lock_guard<std::mutex> guard(recorder.lock);
  for (Event& event : recorder.events) {
    const Owner* owner = recorder.owner(static_cast<uint64_t>(event.node));
    if (owner == nullptr) continue;
    event.program = owner->program;
    event.launch = owner->launch;
  }
  for (std::string& name : recorder.names) name = demangled(name);
  return recorder.status;
}

MBC_EXPORT int64_t mbc_recorder_events(const Event** events) {
  *events = recorder.events.data();
  return static_cast<int64_t>(recorder.events.size());
}

MBC_EXPORT const char* mbc_recorder_name(int64_t number) { return recorder.names.at(static_cast<size_t>(number)).c_str(); }

MBC_EXPORT uint64_t mbc_recorder_dropped() { return recorder.dropped; }

MBC_EXPORT const char* mbc_recorder_failure() { return recorder.failure.c_str(); }

// Lets another tool subscribe.
MBC_EXPORT void mbc_recorder_close() {
  if (recorder.subscriber != nullptr) cuptiUnsubscribe(recorder.subscriber);
  recorder.subscriber = nullptr;
}
