// CUPTI without a driver, for recorder.cpp as it is: compiled against CUPTI's own headers, so that records are laid out as
// the real ones are. A graph node is a pointer whose value is its id; what runs is queued as records in one buffer and
// delivered by a flush.
#include <cupti.h>

#include <cstring>
#include <vector>

namespace {

union Record {
  CUpti_Activity any;
  CUpti_ActivityKernel9 kernel;
  CUpti_ActivityMemcpy5 copy;
  CUpti_ActivityMemcpyPtoP4 peer_copy;
  CUpti_ActivityMemset4 fill;
};

CUpti_CallbackFunc on_resource;
CUpti_BuffersCallbackRequestFunc request;
CUpti_BuffersCallbackCompleteFunc complete;
std::vector<Record> queued;
CUptiResult failure = CUPTI_SUCCESS;
size_t dropped = 0;
int enabled = 0;
int subscribers = 0;

template <typename Kind>
void fill_in(Kind& record, uint64_t start, uint64_t end, uint32_t call, uint64_t node, uint32_t graph, uint32_t stream) {
  record.start = start;
  record.end = end;
  record.correlationId = call;
  record.graphNodeId = node;
  record.graphId = graph;
  record.streamId = stream;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE void fake_fail(int status) { failure = static_cast<CUptiResult>(status); }
FAKE void fake_drop(size_t count) { dropped = count; }
FAKE int fake_enabled() { return enabled; }
FAKE int fake_subscribers() { return subscribers; }

// kind: a CUpti_ActivityKind.
FAKE void fake_ran(int kind, const char* name, uint64_t start, uint64_t end, uint32_t call, uint64_t node, uint32_t graph,
                   uint32_t stream) {
  if (enabled == 0) return;
  Record record;
  std::memset(&record, 0xA5, sizeof record);
  record.any.kind = static_cast<CUpti_ActivityKind>(kind);
  switch (record.any.kind) {
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      fill_in(record.copy, start, end, call, node, graph, stream);
      record.copy.copyKind = CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
      break;
    case CUPTI_ACTIVITY_KIND_MEMCPY2:
      fill_in(record.peer_copy, start, end, call, node, graph, stream);
      record.peer_copy.copyKind = CUPTI_ACTIVITY_MEMCPY_KIND_PTOP;
      break;
    case CUPTI_ACTIVITY_KIND_MEMSET:
      fill_in(record.fill, start, end, call, node, graph, stream);
      break;
    default:
      fill_in(record.kernel, start, end, call, node, graph, stream);
      record.kernel.name = name;
  }
  queued.push_back(record);
}

FAKE void fake_clone(uint64_t original, uint64_t clone) {
  CUpti_GraphData graph{};
  graph.node = reinterpret_cast<CUgraphNode>(clone);
  graph.originalNode = reinterpret_cast<CUgraphNode>(original);
  CUpti_ResourceData data{};
  data.resourceDescriptor = &graph;
  on_resource(nullptr, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED, &data);
}

extern "C" {
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc callback, void*) {
  if (failure != CUPTI_SUCCESS) return failure;
  ++subscribers;
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(&subscribers);
  on_resource = callback;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) {
  --subscribers;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc requested,
                                           CUpti_BuffersCallbackCompleteFunc completed) {
  request = requested;
  complete = completed;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind) {
  ++enabled;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind) {
  --enabled;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityFlushAll(uint32_t) {
  uint8_t* buffer = nullptr;
  size_t bytes = 0, most = 1;
  request(&buffer, &bytes, &most);
  const size_t taken = queued.size() * sizeof(Record);
  if (buffer == nullptr || bytes < taken || most != 0) return CUPTI_ERROR_OUT_OF_MEMORY;
  std::memcpy(buffer, queued.data(), taken);
  complete(nullptr, 0, buffer, bytes, taken);
  queued.clear();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, CUpti_Activity** record) {
  uint8_t* next = *record == nullptr ? buffer : reinterpret_cast<uint8_t*>(*record) + sizeof(Record);
  if (next >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* count) {
  *count = dropped;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetGraphNodeId(CUgraphNode node, uint64_t* id) {
  *id = reinterpret_cast<uint64_t>(node);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
          : result == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES          ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
                                                                   : "CUPTI_ERROR_UNKNOWN";
  return CUPTI_SUCCESS;
}
}
