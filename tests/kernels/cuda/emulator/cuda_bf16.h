// bf16 in software: the upper half of an fp32, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline __nv_bfloat16 __float2bfloat16(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // as CUDA makes every NaN
  return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}
