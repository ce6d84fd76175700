// The tensor memory accelerator in software: boxes are copied when copies are started.
#pragma once

namespace mbc {

// Of up to three dimensions, innermost first. The box's rows are multiples of 16 bytes, and so are the tensor's.
struct TensorMap {
  char* first;
  int32_t bytes;
  int64_t sizes[3];
  int32_t box[3];
  bool swizzled;

  // Calls `run` with every 16 bytes of the box, null outside of the tensor, and their place in shared memory.
  template <typename Run>
  void each_vector(const int32_t (&at)[3], Run run) const {
    // On an H100 a box that begins elsewhere in a row is an illegal instruction.
    if (int64_t{at[0]} * bytes % 16 != 0) std::abort();
    const int64_t row_bytes = sizes[0] * bytes;
    for (int32_t plane = 0; plane < box[2]; ++plane)
      for (int32_t row = 0; row < box[1]; ++row)
        for (int32_t b = 0; b < box[0] * bytes; b += 16) {
          const int64_t p = at[2] + plane, r = at[1] + row, in_row = static_cast<int64_t>(at[0]) * bytes + b;
          const int32_t line = plane * box[1] + row;
          const int32_t place = swizzled ? swizzled_offset(line, b / 16) : line * box[0] * bytes + b;
          const bool of_tensor = p >= 0 && p < sizes[2] && r >= 0 && r < sizes[1];
          const bool inside = of_tensor && in_row >= 0 && in_row < row_bytes;
          run(inside ? first + (p * sizes[1] + r) * row_bytes + in_row : nullptr, place);
        }
  }
};

template <int RANK>
const char* make_tensor_map(TensorMap& map, const void* first, int bytes, const int64_t (&sizes)[RANK],
                            const int (&box)[RANK], bool swizzled) {
  map = {static_cast<char*>(const_cast<void*>(first)), bytes, {1, 1, 1}, {1, 1, 1}, swizzled};
  bool takes = aligned(first, 16) && sizes[0] * bytes % 16 == 0 && box[0] * bytes % 16 == 0;
  for (int i = 0; i < RANK; ++i) {
    map.sizes[i] = sizes[i];
    map.box[i] = box[i];
    takes = takes && sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
  }
  takes = takes && (!swizzled || box[0] * bytes == SWIZZLE_ROW);
  return takes ? nullptr : "the driver makes no such tensor map";
}

// Where a box lies in shared memory, which has to be aligned for the hardware.
inline void check_aligned(const void* at, const TensorMap& map) {
  if (!aligned(at, map.swizzled ? SWIZZLE_ATOM : 128)) std::abort();
}

inline void tma_load(void* to, const TensorMap& map, const int32_t (&at)[3], Barrier& full) {
  check_aligned(to, map);
  map.each_vector(at, [&](const char* from, int32_t place) {
    char* vector = static_cast<char*>(to) + place;
    if (from)
      std::memcpy(vector, from, 16);
    else
      std::memset(vector, 0, 16);
  });
  full.complete_tx(int64_t{map.box[0]} * map.box[1] * map.box[2] * map.bytes);
}
inline void tma_load(void* to, const TensorMap& map, const int32_t (&at)[2], Barrier& full) {
  tma_load(to, map, {at[0], at[1], 0}, full);
}
inline void tma_store(const TensorMap& map, const int32_t (&at)[3], const void* from) {
  check_aligned(from, map);
  map.each_vector(at, [&](char* vector, int32_t place) {
    if (vector) std::memcpy(vector, static_cast<const char*>(from) + place, 16);
  });
}
inline void tma_store_wait_read() {}

}  // namespace mbc
