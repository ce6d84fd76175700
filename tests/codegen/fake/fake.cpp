// A recording fake of the CUDA runtime. Nothing is computed: each call becomes a line of the log, which a test compares
// with the plan. Streams are numbers from 1 in disguise, addresses are never followed.
#include "fake.h"

#include <map>
#include <vector>

struct FakeEvent {
  int launch = -2;  // the launch after which it was recorded; -1: none before it on its stream
};
// What a launch and each detail of one adds to a captured graph: a number, from 1, in disguise.
struct FakeGraph {
  int nodes = 0;
};
struct FakeGraphExec {};

namespace {

struct State {
  const char* arena = nullptr;
  const char* host = nullptr;
  int launches = 0;                // in this run
  std::map<int, int> last_launch;  // of each stream
  std::ostringstream log;
  std::string text;
  bool capturing = false;
  FakeGraph captured;
  int fail_at = -1;  // the launch that fails
  bool has_everything = false;
};

State& state() {
  static State the;
  return the;
}

int last_of(int stream) {
  const auto found = state().last_launch.find(stream);
  return found == state().last_launch.end() ? -1 : found->second;
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) void fake_reset(void* arena, void* host) {
  State& the = state();
  the.arena = static_cast<const char*>(arena);
  the.host = static_cast<const char*>(host);
  the.launches = 0;
  the.last_launch.clear();
  the.log.str("");
  the.fail_at = -1;
}
__attribute__((visibility("default"))) const char* fake_log() {
  state().text = state().log.str();
  return state().text.c_str();
}
__attribute__((visibility("default"))) void fake_fail_at(int launch) { state().fail_at = launch; }
__attribute__((visibility("default"))) void fake_have_everything() { state().has_everything = true; }
}

bool fake_has_everything() { return state().has_everything; }

int64_t fake_offset(const void* pointer) {
  const State& the = state();
  const char* p = static_cast<const char*>(pointer);
  if (the.host != nullptr && p >= the.host) return -1 - (p - the.host);
  return p - the.arena;
}

int fake_stream(cudaStream_t stream) { return static_cast<int>(reinterpret_cast<intptr_t>(stream)) - 1; }

std::ostringstream& fake_launch(const char* name, cudaStream_t stream) {
  State& the = state();
  ++the.captured.nodes;
  the.last_launch[fake_stream(stream)] = the.launches;
  the.log << "launch " << the.launches++ << ' ' << name << " stream=" << fake_stream(stream);
  return the.log;
}

std::ostringstream& fake_detail(const char* name) {
  ++state().captured.nodes;
  state().log << "detail " << name;
  return state().log;
}

void fake_end() { state().log << '\n'; }

const char* fake_kernel(const char* name, const MbcCall& call) {
  std::vector<int64_t> offsets, integers(call.integers, call.integers + call.integer_count);
  for (int64_t i = 0; i < call.pointer_count; ++i) offsets.push_back(fake_offset(call.pointers[i]));
  std::ostringstream& out = fake_launch(name, call.stream);
  fake_list(out, "offsets", offsets);
  fake_list(out, "integers", integers);
  fake_end();
  return state().launches - 1 == state().fail_at ? "made to fail" : nullptr;
}

extern "C" const char* mbc_widen(const MbcCall& call) {
  std::ostringstream& out = fake_detail("mbc_widen");
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(call.pointers[0]), fake_offset(call.pointers[1])});
  fake_list(out, "integers", std::initializer_list<int64_t>{call.integers[0], call.integers[1], call.integers[2]});
  fake_end();
  return nullptr;
}

extern "C" const char* mbc_moments(const MbcCall& call) {
  std::ostringstream& out = fake_detail("mbc_moments");
  fake_list(out, "offsets",
            std::initializer_list<int64_t>{fake_offset(call.pointers[0]), fake_offset(call.pointers[1]),
                                           fake_offset(call.pointers[2])});
  fake_list(out, "integers", std::initializer_list<int64_t>{call.integers[0], call.integers[1]});
  fake_end();
  return nullptr;
}

extern "C" const char* mbc_sum_parts(const MbcCall& call) {
  std::ostringstream& out = fake_detail("mbc_sum_parts");
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(call.pointers[0]), fake_offset(call.pointers[1])});
  fake_list(out, "integers", std::initializer_list<int64_t>{call.integers[0], call.integers[1]});
  fake_end();
  return nullptr;
}

const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "invalid argument"; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new FakeEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->launch = last_of(fake_stream(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event->launch == -2) return cudaErrorInvalidValue;  // never recorded: a real GPU would not wait
  state().log << "wait stream=" << fake_stream(stream) << " launch=" << event->launch << '\n';
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return state().capturing ? cudaErrorInvalidValue : cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  state().capturing = true;
  state().captured = {};
  state().launches = 0;
  state().last_launch.clear();
  state().log << "begin capture\n";
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  state().capturing = false;
  state().log << "end capture\n";
  *graph = new FakeGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*,
                                     cudaGraph_t* graph) {
  *status = state().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *graph = state().capturing ? &state().captured : nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (graph == nullptr) return cudaErrorInvalidValue;
  const size_t there = static_cast<size_t>(graph->nodes);
  for (size_t i = 0; nodes != nullptr && i < *count; ++i)  // no order: the even ones, then the odd ones
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(i < there / 2 ? 2 * i + 2 : 2 * (i - there / 2) + 1);
  *count = there;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  *executable = new FakeGraphExec;
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
  state().log << "replay stream=" << fake_stream(stream) << '\n';
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int, size_t bytes, cudaStream_t) {
  std::ostringstream& out = fake_detail("memset");
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(bytes)});
  fake_end();
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  std::ostringstream& out = fake_launch("copy", stream);
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(bytes)});
  fake_end();
  return cudaSuccess;
}
