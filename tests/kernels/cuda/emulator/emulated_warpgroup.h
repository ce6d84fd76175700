// Barriers that count, and wgmma, in software: copies arrive at once, and products are made when they are started, each
// thread its own results from its warp's fragments and from shared memory.
#pragma once

namespace mbc {

inline uint32_t shared_address(const void* at) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)); }

struct Barrier {
  uint64_t word;  // parity of the phase that goes on; arrivals of a phase, and those still to come, of 16 bits each

  void start(int count) { word = static_cast<uint64_t>(count) * 0x10001u; }
  void arrive() {
    if (--word % 0x10000u == 0) word = (word ^ emulator::PARITY) + (word >> 16 & 0xffffu);
  }
  void arrive_with_copies() { arrive(); }
  void arrive_with_block(void* to, const void* from, int bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    arrive();
  }
  void wait(uint32_t parity) { emulator::wait_for_phase(word, parity); }
};
inline void barriers_are_started() {}
inline void show_to_tensor_cores() {}

template <int COUNT>
void take_registers() {}
template <int COUNT>
void give_registers() {}
inline void begin_products() {}
inline void end_of_products() {}
template <int LATER = 0, int TILES>
void wait_for_products(float (&)[TILES][4]) {}

// Element (term, column) of an operand in pieces.
template <typename T = __half>
float of_operand(const Pieces& b, bool by_term, unsigned term, unsigned column) {
  const unsigned row = by_term ? term : column, other = by_term ? column : term;
  const char* at = static_cast<const char*>(b.first) + b.begin + column / 8 * static_cast<unsigned>(b.columns_apart) +
                   term / 8 * static_cast<unsigned>(b.terms_apart) + row % 8 * 16 + other % 8 * 2;
  T value;
  std::memcpy(&value, at, sizeof(value));
  return to_float(value);
}

// The same of rows of 128 bytes: tensor cores exchange 16 bytes of a row by the address they come to.
template <typename T = __half>
float of_operand(const void* b, bool by_term, unsigned term, unsigned column) {
  const unsigned row = by_term ? term : column, other = by_term ? column : term;
  auto at = reinterpret_cast<uintptr_t>(b) + row / 8 * OPERAND_GROUP + row % 8 * OPERAND_ROW +
            other / 64 * OPERAND_BLOCK + other % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(at), sizeof(value));
  return to_float(value);
}

template <bool BY_TERM, int TILES, typename Operand>
void multiply_halves(float (&d)[TILES][4], const uint32_t (&a)[4], const Operand& b, bool adds) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], 0, 0};
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  float rows[2][16];
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k)
      rows[h][k] = element<__half>(all.of(lane / 4 * 4 + k % 8 / 2)[h + 2 * (k / 8)], k % 2);
  for (unsigned j = 0; j < TILES; ++j)
    for (unsigned v = 0; v < 4; ++v) {
      float sum = adds ? d[j][v] : 0.0f;
      for (unsigned k = 0; k < 16; ++k)
        sum += rows[v / 2][k] * of_operand(b, BY_TERM, k, 8 * j + lane % 4 * 2 + v % 2);
      d[j][v] = sum;
    }
}

template <bool BY_TERM, typename T, int TILES, typename Operand>
void multiply_shared(float (&d)[TILES][4], const Operand& a, const Operand& b, bool adds) {
  const unsigned thread = emulator::current % WARPGROUP, lane = thread % emulator::WARP;
  float rows[2][16];
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k)
      rows[h][k] = of_operand<T>(a, false, k, thread / emulator::WARP * 16 + lane / 4 + 8 * h);
  for (unsigned j = 0; j < TILES; ++j)
    for (unsigned e = 0; e < 2; ++e) {
      float sums[2] = {adds ? d[j][e] : 0.0f, adds ? d[j][2 + e] : 0.0f};
      for (unsigned k = 0; k < 16; ++k) {
        const float value = of_operand<T>(b, BY_TERM, k, 8 * j + lane % 4 * 2 + e);
        for (unsigned h = 0; h < 2; ++h) sums[h] += rows[h][k] * value;
      }
      d[j][e] = sums[0];
      d[j][2 + e] = sums[1];
    }
}

}  // namespace mbc
