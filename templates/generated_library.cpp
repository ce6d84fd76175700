// A library of generated kernels alone, which mbc/measure/generated_libraries.py loads.
#include "mbc_call.h"
#include "mbc_module.h"

extern "C" MBC_EXPORT void mbc_set_multiprocessors(int64_t count) { mbc::multiprocessors_of_part = count; }
