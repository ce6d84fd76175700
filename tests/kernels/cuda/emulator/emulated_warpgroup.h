// mbarriers and wgmma in software: copies arrive immediately, and wgmma are computed when they are started, each thread
// its own results from its warp's fragments and from shared memory.
#pragma once

namespace mbc {

inline uint32_t shared_address(const void* at) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)); }

struct Barrier {
  uint64_t word;  // parity of the phase that goes on; arrivals of a phase, and those still to come, of 16 bits each
  int64_t expected_bytes;  // of the phase, less those that have come: a wrong number never ends it

  void start(int count) {
    word = static_cast<uint64_t>(count) * 0x10001u;
    expected_bytes = 0;
  }
  void arrive() {
    --word;
    end_phase();
  }
  void cp_async_arrive() { arrive(); }
  void arrive_expect_tx(int bytes) {
    expected_bytes += bytes;
    arrive();
  }
  void complete_tx(int64_t bytes) {
    expected_bytes -= bytes;
    end_phase();
  }
  void end_phase() {
    if (word % 0x10000u == 0 && expected_bytes == 0) word = (word ^ emulator::PARITY) + (word >> 16 & 0xffffu);
  }
  void bulk_copy_arrive(void* to, const void* from, int bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    arrive();
  }
  void wait(uint32_t parity) { emulator::wait_for_phase(word, parity); }
};
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}

template <int COUNT>
void setmaxnreg_inc() {}
template <int COUNT>
void setmaxnreg_dec() {}
inline void wgmma_fence() {}
template <int TILES>
void wgmma_fence(float (&)[TILES][4]) {}
inline void wgmma_commit() {}
template <int LATER = 0, int TILES>
void wgmma_wait(float (&)[TILES][4]) {}

// Every thread shows its words, and stores those of the rows whose addresses other threads supply.
inline void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t mine[6] = {a, b, c, d};
  std::memcpy(mine + 4, &row, sizeof(row));
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    char* to;
    std::memcpy(&to, all.of(matrix * 8 + lane / 4) + 4, sizeof(to));
    std::memcpy(to + lane % 4 * 4, &mine[matrix], 4);
  }
}

inline void stmatrix_x4_trans(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t mine[6] = {a, b, c, d};
  std::memcpy(mine + 4, &row, sizeof(row));
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  for (unsigned matrix = 0; matrix < 4; ++matrix)
    for (unsigned e = 0; e < 2; ++e) {
      char* to;
      std::memcpy(&to, all.of(matrix * 8 + lane % 4 * 2 + e) + 4, sizeof(to));
      const auto element = static_cast<uint16_t>(mine[matrix] >> 16 * e);
      std::memcpy(to + lane / 4 * 2, &element, 2);
    }
}

class SwizzledDescriptor {
 public:
  explicit SwizzledDescriptor(const void* first_) : first(static_cast<const char*>(first_)) {}
  SwizzledDescriptor ahead(int32_t bytes) const { return SwizzledDescriptor(first + bytes); }

  const char* first;
};

class CoreMatrixDescriptor {
 public:
  explicit CoreMatrixDescriptor(const CoreMatrices& matrices_) : matrices(matrices_) {}
  CoreMatrixDescriptor ahead(int32_t bytes) const {
    CoreMatrixDescriptor moved = *this;
    moved.matrices.begin += bytes;
    return moved;
  }

  CoreMatrices matrices;
};

// Element (k, column) of an operand in core matrices.
template <typename T>
float of_operand(const CoreMatrices& b, bool mn_major, unsigned term, unsigned column) {
  const unsigned row = mn_major ? term : column, other = mn_major ? column : term;
  const char* at = static_cast<const char*>(b.first) + b.begin + column / 8 * static_cast<unsigned>(b.stride_bytes) +
                   term / 8 * static_cast<unsigned>(b.leading_bytes) + row % 8 * 16 + other % 8 * 2;
  T value;
  std::memcpy(&value, at, sizeof(value));
  return to_float(value);
}

// The same of rows of 128 bytes: the 128-byte swizzle exchanges 16 bytes of a row by their address.
template <typename T>
float of_operand(const void* b, bool mn_major, unsigned term, unsigned column) {
  const unsigned row = mn_major ? term : column, other = mn_major ? column : term;
  auto at = reinterpret_cast<uintptr_t>(b) + row / 8 * SWIZZLE_ATOM + row % 8 * SWIZZLE_ROW +
            other / 64 * SWIZZLE_BLOCK + other % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(at), sizeof(value));
  return to_float(value);
}

template <typename T>
float of_operand(const CoreMatrixDescriptor& b, bool mn_major, unsigned term, unsigned column) {
  return of_operand<T>(b.matrices, mn_major, term, column);
}

template <typename T>
float of_operand(const SwizzledDescriptor& b, bool mn_major, unsigned term, unsigned column) {
  return of_operand<T>(b.first, mn_major, term, column);
}

template <bool MN_MAJOR, typename T, int TILES, typename Operand>
void wgmma_rs(float (&d)[TILES][4], const uint32_t (&a)[4], const Operand& b, bool adds) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], 0, 0};
  const emulator::WarpWords all(mine);
  const unsigned lane = emulator::current % emulator::WARP;
  float rows[2][16];
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k)
      rows[h][k] = element<T>(all.of(lane / 4 * 4 + k % 8 / 2)[h + 2 * (k / 8)], k % 2);
  for (unsigned j = 0; j < TILES; ++j)
    for (unsigned v = 0; v < 4; ++v) {
      float sum = adds ? d[j][v] : 0.0f;
      for (unsigned k = 0; k < 16; ++k)
        sum += rows[v / 2][k] * of_operand<T>(b, MN_MAJOR, k, 8 * j + lane % 4 * 2 + v % 2);
      d[j][v] = sum;
    }
}

template <bool MN_MAJOR, typename T, int TILES, typename Operand>
void wgmma_ss(float (&d)[TILES][4], const Operand& a, const Operand& b, bool adds) {
  const unsigned thread = emulator::current % WARPGROUP, lane = thread % emulator::WARP;
  float rows[2][16];
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 16; ++k)
      rows[h][k] = of_operand<T>(a, false, k, thread / emulator::WARP * 16 + lane / 4 + 8 * h);
  for (unsigned j = 0; j < TILES; ++j)
    for (unsigned e = 0; e < 2; ++e) {
      float sums[2] = {adds ? d[j][e] : 0.0f, adds ? d[j][2 + e] : 0.0f};
      for (unsigned k = 0; k < 16; ++k) {
        const float value = of_operand<T>(b, MN_MAJOR, k, 8 * j + lane % 4 * 2 + e);
        for (unsigned h = 0; h < 2; ++h) sums[h] += rows[h][k] * value;
      }
      d[j][e] = sums[0];
      d[j][2 + e] = sums[1];
    }
}

}  // namespace mbc
