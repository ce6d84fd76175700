// mma.m16n8k16 and mma.m16n8k8 in software: every thread shows its fragments to its warp and computes its own four results.
#pragma once

namespace mbc {

template <typename T>
float element(uint32_t word, int half) {
  const uint16_t bits = static_cast<uint16_t>(word >> (16 * half));
  T value;
  std::memcpy(&value, &bits, 2);
  return to_float(value);
}

// Element (row, k) of A is held by thread (row % 8, k % 8 / 2), in word row / 8 + 2 * (k / 8).
template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t left = all.of(row % 8 * 4 + k % 8 / 2)[row / 8 + 2 * (k / 8)];
      const uint32_t right = all.of(column * 4 + k % 8 / 2)[4 + k / 8];
      d[i] += element<T>(left, k % 2) * element<T>(right, k % 2);
    }
  }
}

inline uint32_t bits_of(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word;
}
inline float of_bits(uint32_t word) {
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline float truncate_to_tf32(float x) { return of_bits(bits_of(x) & 0xffffe000u); }

// Element (row, k) of A is held by thread (row % 8, k % 4), in word row / 8 + 2 * (k / 4).
inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  const uint32_t mine[6] = {bits_of(a[0]), bits_of(a[1]), bits_of(a[2]), bits_of(a[3]), bits_of(b0), bits_of(b1)};
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 8; ++k) {
      const uint32_t left = all.of(row % 8 * 4 + k % 4)[row / 8 + 2 * (k / 4)];
      const uint32_t right = all.of(column * 4 + k % 4)[4 + k / 4];
      d[i] += truncate_to_tf32(of_bits(left)) * truncate_to_tf32(of_bits(right));
    }
  }
}

// Ties away from zero; what is not finite stays.
inline float to_tf32(float x) {
  const uint32_t word = bits_of(x);
  return (word & 0x7f800000u) == 0x7f800000u ? x : of_bits((word + 0x1000u) & 0xffffe000u);
}

// Copies arrive immediately.
inline void cp_async_16(uint4* to, const void* from, bool there) {
  if (there)
    std::memcpy(to, from, 16);
  else
    std::memset(to, 0, 16);
}
inline void cp_async_commit() {}
template <int N>
void cp_async_wait() {}

// Element `half` of the word that a thread gets of a matrix: (row, column) of it.
template <typename Place>
void ldmatrix(uint32_t (&words)[4], const uint4* row, const Place& place) {
  uint32_t mine[6] = {};
  std::memcpy(mine, &row, sizeof(row));
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  for (unsigned i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (unsigned half = 0; half < 2; ++half) {
      const auto [from_row, column] = place(lane / 4, lane % 4 * 2 + half);
      const uint16_t* from;
      std::memcpy(&from, all.of(8 * i + from_row), sizeof(from));
      pair[half] = from[column];
    }
    std::memcpy(&words[i], pair, 4);
  }
}
inline void ldmatrix_x4(uint32_t (&words)[4], const uint4* row) {
  ldmatrix(words, row, [](unsigned g, unsigned own) { return std::array{g, own}; });
}
inline void ldmatrix_x4_trans(uint32_t (&words)[4], const uint4* row) {
  ldmatrix(words, row, [](unsigned g, unsigned own) { return std::array{own, g}; });
}

}  // namespace mbc
