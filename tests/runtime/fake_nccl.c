// A libnccl.so that records its calls. Structs and prototypes as nccl.h of NCCL 2.27 has them.
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm { int rank; } *ncclComm_t;
typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare, trafficClass;
  const char* commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;

enum { SUCCESS = 0, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
static char text[8192];
static int version = 22703, polls_left, async_error, call_status;
static struct ncclComm only;
static void *reached, **registered;  // a window; where it will be written

#define LOG(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

void fake_reset(int a_version, int polls, int error, int status) {
  text[0] = 0;
  version = a_version;
  polls_left = polls;
  async_error = error;
  call_status = status;
  reached = (void*)0x2000;
  registered = NULL;
}
void fake_polls(int polls) { polls_left = polls; }
void fake_unreachable(void) { reached = NULL; }
const char* fake_log(void) { return text; }

int ncclGetVersion(int* found) { *found = version; return SUCCESS; }
const char* ncclGetErrorString(int status) { return status == REMOTE_ERROR ? "remote process exited" : "unknown"; }
const char* ncclGetLastError(ncclComm_t comm) { return comm ? "rank 1 is gone" : ""; }
int ncclGetUniqueId(ncclUniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(2 * i);
  return SUCCESS;
}
int ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* c) {
  for (int i = 0; i < 128; ++i)
    if (id.internal[i] != (char)(2 * i)) return 4;
  if (c->size != sizeof *c || c->magic != 0xcafebeef || c->version != 22700) return 4;
  LOG("init %d of %d blocking=%d ctas=%d..%d split=%d;", rank, ranks, c->blocking, c->minCTAs, c->maxCTAs, c->splitShare);
  if (c->cgaClusterSize != INT_MIN || c->netName || c->trafficClass != INT_MIN || c->commName ||
      c->collnetEnable != INT_MIN || c->CTAPolicy != INT_MIN || c->shrinkShare != INT_MIN || c->nvlsCTAs != INT_MIN)
    LOG("set;");
  only.rank = rank;
  *comm = &only;
  return call_status;
}
int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, ncclComm_t comm, void* stream) {
  LOG("all_reduce %zx %zx %zu %d %d %d %zx;", (size_t)in, (size_t)out, count, type, op, comm->rank, (size_t)stream);
  return call_status;
}
int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, ncclComm_t comm, void* stream) {
  LOG("reduce_scatter %zx %zx %zu %d %d;", (size_t)in, (size_t)out, count, type, op);
  return call_status;
}
int ncclAllGather(const void* in, void* out, size_t count, int type, ncclComm_t comm, void* stream) {
  LOG("all_gather %zx %zx %zu %d;", (size_t)in, (size_t)out, count, type);
  return call_status;
}
int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, ncclComm_t comm, void* stream) {
  LOG("broadcast %zx %zx %zu %d %d;", (size_t)in, (size_t)out, count, type, root);
  return call_status;
}
int ncclGroupStart(void) { LOG("group;"); return SUCCESS; }
int ncclGroupEnd(void) { LOG("end;"); return call_status; }
int ncclAlltoAll(const void* in, void* out, size_t count, int type, ncclComm_t comm, void* stream) {
  LOG("all_to_all %zx %zx %zu %d;", (size_t)in, (size_t)out, count, type);
  return call_status;
}
int ncclCommWindowRegister(ncclComm_t comm, void* address, size_t size, void** window, int flags) {
  LOG("register %zx %zu %d;", (size_t)address, size, flags);
  registered = window;  // NCCL says that it is done, and goes on in a thread of its own
  if (!polls_left) *window = reached;
  return call_status;
}
int ncclCommWindowDeregister(ncclComm_t comm, void* window) { LOG("deregister %zx;", (size_t)window); return call_status; }
int ncclCommGetAsyncError(ncclComm_t comm, int* state) {
  *state = polls_left-- > 0 ? IN_PROGRESS : async_error;
  if (registered && *state != IN_PROGRESS) *registered = reached, registered = NULL;
  return SUCCESS;
}
int ncclCommAbort(ncclComm_t comm) { LOG("abort;"); return SUCCESS; }
int ncclCommFinalize(ncclComm_t comm) { LOG("finalize;"); return call_status; }
int ncclCommDestroy(ncclComm_t comm) { LOG("destroy;"); return SUCCESS; }
int ncclMemAlloc(void** address, size_t size) { LOG("allocate %zu;", size); *address = (void*)0x1000; return SUCCESS; }
int ncclMemFree(void* address) { LOG("free %zx;", (size_t)address); return SUCCESS; }
