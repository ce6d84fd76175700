// What g++ calls at every basic block and comparison of the kernels with -fsanitize-coverage=trace-pc,trace-cmp: notes
// which blocks ran, and whether the left side of each comparison was smaller, equal or larger.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define UNTRACED __attribute__((no_sanitize_coverage))

extern "C" {
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char etext[] __attribute__((visibility("hidden")));
}

namespace {
constexpr size_t MOST_BYTES = size_t{1} << 28;
uint8_t seen[MOST_BYTES];  // a byte for each byte of code

template <typename T>
UNTRACED inline void compare(const void* at, T left, T right) {
  seen[static_cast<const char*>(at) - __ehdr_start] |= left < right ? 1 : left == right ? 2 : 4;
}
}  // namespace

#define TRACE(name, type) \
  extern "C" UNTRACED void name(type left, type right) { compare(__builtin_return_address(0), left, right); }

extern "C" UNTRACED void __sanitizer_cov_trace_pc() {
  seen[static_cast<const char*>(__builtin_return_address(0)) - __ehdr_start] |= 8;
}
TRACE(__sanitizer_cov_trace_cmp1, int8_t)
TRACE(__sanitizer_cov_trace_cmp2, int16_t)
TRACE(__sanitizer_cov_trace_cmp4, int32_t)
TRACE(__sanitizer_cov_trace_cmp8, int64_t)
TRACE(__sanitizer_cov_trace_const_cmp1, int8_t)
TRACE(__sanitizer_cov_trace_const_cmp2, int16_t)
TRACE(__sanitizer_cov_trace_const_cmp4, int32_t)
TRACE(__sanitizer_cov_trace_const_cmp8, int64_t)
TRACE(__sanitizer_cov_trace_cmpf, float)
TRACE(__sanitizer_cov_trace_cmpd, double)
extern "C" UNTRACED void __sanitizer_cov_trace_switch(uint64_t, void*) {}

extern "C" UNTRACED size_t mbc_covered(const uint8_t** bytes) {
  *bytes = seen;
  return static_cast<size_t>(etext - __ehdr_start);
}
extern "C" UNTRACED void mbc_forget() { memset(seen, 0, static_cast<size_t>(etext - __ehdr_start)); }
