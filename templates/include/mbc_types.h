// Codes of element types and layouts in the integers of a launch, equal to those in mbc/kernels/base.py.
#pragma once

#include <cstdint>

enum MbcType : int64_t { MBC_FP32 = 0, MBC_BF16 = 1, MBC_FP16 = 2, MBC_INT32 = 3, MBC_UINT8 = 4 };
enum MbcLayout : int64_t { MBC_CHANNELS_FIRST = 0, MBC_CHANNELS_LAST = 1 };
