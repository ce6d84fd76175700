// The tensor memory accelerator in software: boxes are copied when copies are started.
#pragma once

namespace mbc {

struct TensorMap {
  const char* first;
  int64_t rows, row_bytes;
  int32_t element_bytes, box_rows, box_row_bytes;
  bool swizzled;
};

inline const char* make_tensor_map(TensorMap& map, const void* first, int bytes, int64_t rows, int64_t columns,
                                   int box_rows, int box_columns, bool swizzled) {
  map = {static_cast<const char*>(first), rows, columns * bytes, bytes, box_rows, box_columns * bytes, swizzled};
  const bool takes = aligned(first, 16) && map.row_bytes % 16 == 0 && map.box_row_bytes % 16 == 0 && box_rows <= 256 &&
                     box_columns <= 256 && (!swizzled || map.box_row_bytes == SWIZZLE_ROW);
  return takes ? nullptr : "the driver makes no such tensor map";
}

inline void copy_box(void* to, const TensorMap& map, int32_t row, int32_t column, Barrier&) {
  for (int32_t r = 0; r < map.box_rows; ++r)
    for (int32_t b = 0; b < map.box_row_bytes; b += 16) {
      const int64_t at = static_cast<int64_t>(column) * map.element_bytes + b;
      char* sixteen = static_cast<char*>(to) + (map.swizzled ? swizzled_offset(r, b / 16) : r * map.box_row_bytes + b);
      if (row + r < map.rows && at < map.row_bytes)
        std::memcpy(sixteen, map.first + (row + r) * map.row_bytes + at, 16);
      else
        std::memset(sixteen, 0, 16);
    }
}

}  // namespace mbc
