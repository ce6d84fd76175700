// What Python hands a module of NCCL: a recording fake of its functions, by the prototypes of nccl.h (enumerations as
// int). The address of the communicator is logged as it is.
#include "fake.h"
#include "mbc_module.h"

namespace {

constexpr int SUCCESS = 0, IN_PROGRESS = 7;
int polls_left = 0, end_status = SUCCESS;
bool in_group = false, begun = false;  // of calls; the first of them begins the launch

int all_reduce(const void* from, void* to, size_t count, int type, int operation, void* communicator, void* stream) {
  std::ostringstream& out = fake_launch("nccl", static_cast<cudaStream_t>(stream));
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count)});
  out << " type=" << type << " operation=" << operation
      << " communicator=" << reinterpret_cast<intptr_t>(communicator);
  fake_end();
  return polls_left > 0 ? IN_PROGRESS : end_status;
}

// The first of a sum by copies, so that it begins the launch.
int all_to_all(const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
  std::ostringstream& out = fake_launch("nccl", static_cast<cudaStream_t>(stream));
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count)});
  out << " type=" << type << " communicator=" << reinterpret_cast<intptr_t>(communicator);
  fake_end();
  return polls_left > 0 ? IN_PROGRESS : end_status;
}

int all_gather(const void* from, void* to, size_t count, int type, void*, void* stream) {
  const bool first = in_group && !begun;
  std::ostringstream& out = first ? fake_launch("nccl", static_cast<cudaStream_t>(stream)) : fake_detail("all_gather");
  begun = in_group;
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count), type});
  fake_end();
  return !in_group && polls_left > 0 ? IN_PROGRESS : end_status;
}

// The first call of a group begins the launch.
std::ostringstream& of_group(const char* name, void* stream) {
  const bool first = in_group && !begun;
  begun = in_group;
  return first ? fake_launch("nccl", static_cast<cudaStream_t>(stream)) : fake_detail(name);
}

int reduce_scatter(const void* from, void* to, size_t count, int type, int operation, void*, void* stream) {
  std::ostringstream& out = of_group("reduce_scatter", stream);
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count), type, operation});
  fake_end();
  return end_status;
}

int reduce(const void* from, void* to, size_t count, int type, int operation, int root, void*, void* stream) {
  std::ostringstream& out = of_group("reduce", stream);
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count), type, operation, root});
  fake_end();
  return end_status;
}

int broadcast(const void* from, void* to, size_t count, int type, int root, void*, void* stream) {
  std::ostringstream& out = of_group("broadcast", stream);
  fake_list(out, "offsets", std::initializer_list<int64_t>{fake_offset(from), fake_offset(to)});
  fake_list(out, "integers", std::initializer_list<int64_t>{static_cast<int64_t>(count), type, root});
  fake_end();
  return end_status;
}

int group_start() {
  in_group = true;
  begun = false;
  return SUCCESS;
}

int group_end() {
  in_group = false;
  fake_detail("group_end");
  fake_end();
  return polls_left > 0 ? IN_PROGRESS : end_status;
}

int async_error(void* communicator, int* status) {
  fake_detail("polled") << ' ' << reinterpret_cast<intptr_t>(communicator);
  fake_end();
  *status = --polls_left > 0 ? IN_PROGRESS : end_status;
  return SUCCESS;
}

const char* error_string(int status) { return status == 6 ? "remote process exited" : "unknown"; }

}  // namespace

extern "C" {
// `interface` gets everything but the communicator.
__attribute__((visibility("default"))) void fake_nccl(MbcRanks* interface) {
  interface->all_reduce = all_reduce;
  interface->all_to_all = all_to_all;
  interface->all_gather = all_gather;
  interface->reduce_scatter = reduce_scatter;
  interface->reduce = reduce;
  interface->broadcast = broadcast;
  interface->async_error = async_error;
  interface->error_string = error_string;
  interface->group_start = group_start;
  interface->group_end = group_end;
}
// Each call is in progress for so many polls, and then has this status.
__attribute__((visibility("default"))) void fake_nccl_says(int polls, int status) {
  polls_left = polls;
  end_status = status;
}
}
