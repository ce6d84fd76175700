// The log that the fakes write: one line a call, addresses as offsets of the arena (or -1 - offset in host memory).
#pragma once

#include "mbc_call.h"

#include <initializer_list>
#include <sstream>
#include <string>

int64_t fake_offset(const void* pointer);
int fake_stream(cudaStream_t stream);
// Begins the line of a launch and counts it; finish with fake_end.
std::ostringstream& fake_launch(const char* name, cudaStream_t stream);
void fake_end();
// Whether the libraries have every algorithm that is asked for, and need no workspace: plans made from measured
// profiles name what the real libraries have.
bool fake_has_everything();
// A further call of the launch before.
std::ostringstream& fake_detail(const char* name);

template <typename Items>
void fake_list(std::ostringstream& out, const char* name, const Items& items) {
  out << ' ' << name << '=';
  const char* separator = "";
  for (const auto& item : items) {
    out << separator << item;
    separator = ",";
  }
}

// What the launcher of a kernel does here. Kernels do not say how many reals they read, so none are logged.
const char* fake_kernel(const char* name, const MbcCall& call);
