// fp16 in software, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};

namespace emulator {
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
}  // namespace emulator

inline float __half2float(__half x) {
  using namespace emulator;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if ((rest & 0x0f800000u) == 0x0f800000u) return float_of(sign | (rest + ((255u - 31u) << 23)));  // inf, NaN
  // The multiplication moves the exponent and makes subnormal numbers normal.
  return float_of(sign | bits_of(float_of(rest) * float_of((254u - 15u) << 23)));
}

inline __half __float2half(float x) {
  using namespace emulator;
  const uint32_t bits = bits_of(x), rest = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (rest > 0x7f800000u) return {0x7fff};                                      // as CUDA makes every NaN
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};      // too large even when rounded down
  if (rest < 0x38800000u)  // subnormal: the addition rounds at the right bit
    return {static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)))};
  return {static_cast<uint16_t>(sign | ((rest + 0xc8000fffu + ((rest >> 13) & 1u)) >> 13))};
}
