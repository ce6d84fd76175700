// Joining tensors along their channels, and taking channels out again. Both copy rows of bytes between two pitches:
// channels first a row is a sample, channels last a pixel.
#include "mbc_device.cuh"

// Followed by the channels of every input, `inputs` integers.
struct ConcatArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t inner;
  int64_t inputs;
};

struct ChannelSliceArguments {
  int64_t type;
  int64_t layout;
  int64_t rows;
  int64_t channels;
  int64_t inner;
  int64_t start;
  int64_t count;
};

namespace mbc {

template <typename Unit>
__global__ void copy_rows(const Unit* from, Unit* to, int64_t units, int64_t from_pitch, int64_t to_pitch,
                          Steps steps) {
  const int64_t stride = thread_count();
  Walk at(steps, thread_index());
  for (int64_t i = thread_index(); i < units; i += stride, at.advance(steps))
    to[at.outer * to_pitch + at.inner] = from[at.outer * from_pitch + at.inner];
}

template <typename Unit>
bool try_copy(cudaStream_t stream, const char* from, char* to, int64_t rows, int64_t width_bytes,
              int64_t from_pitch_bytes, int64_t to_pitch_bytes) {
  constexpr int64_t size = sizeof(Unit);
  if (!aligned(from, size) || !aligned(to, size) || width_bytes % size || from_pitch_bytes % size ||
      to_pitch_bytes % size)
    return false;
  const int64_t width = width_bytes / size;
  const unsigned blocks = blocks_for(rows * width);
  MBC_LAUNCH((copy_rows<Unit>), blocks, THREADS, stream, reinterpret_cast<const Unit*>(from),
             reinterpret_cast<Unit*>(to), rows * width, from_pitch_bytes / size, to_pitch_bytes / size,
             Steps(width, 1, static_cast<int64_t>(blocks) * THREADS));
  return true;
}

// Elements have 2 or 4 bytes; the largest unit that everything is a multiple of carries them.
inline void copy(cudaStream_t stream, const char* from, char* to, int64_t rows, int64_t width_bytes,
                 int64_t from_pitch_bytes, int64_t to_pitch_bytes) {
  if (try_copy<uint4>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  if (try_copy<uint2>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  if (try_copy<uint32_t>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes)) return;
  try_copy<uint16_t>(stream, from, to, rows, width_bytes, from_pitch_bytes, to_pitch_bytes);
}

inline int64_t element_bytes(int64_t type) { return type == MBC_FP32 ? 4 : 2; }

}  // namespace mbc

extern "C" const char* mbc_concat(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ConcatArguments>(call);
  const int64_t* channels = call.integers + sizeof(ConcatArguments) / sizeof(int64_t);
  const bool last = a.layout == MBC_CHANNELS_LAST;
  const int64_t rows = last ? a.rows * a.inner : a.rows, unit = element_bytes(a.type) * (last ? 1 : a.inner);
  int64_t total = 0, start = 0;
  for (int64_t i = 0; i < a.inputs; ++i) total += channels[i];
  char* to = out<char>(call, static_cast<int>(a.inputs));
  for (int64_t i = 0; i < a.inputs; start += channels[i], ++i)
    copy(call.stream, in<char>(call, static_cast<int>(i)), to + start * unit, rows, channels[i] * unit,
         channels[i] * unit, total * unit);
  return launched();
}

extern "C" const char* mbc_channel_slice(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<ChannelSliceArguments>(call);
  const bool last = a.layout == MBC_CHANNELS_LAST;
  const int64_t rows = last ? a.rows * a.inner : a.rows, unit = element_bytes(a.type) * (last ? 1 : a.inner);
  copy(call.stream, in<char>(call, 0) + a.start * unit, out<char>(call, 1), rows, a.count * unit, a.channels * unit,
       a.count * unit);
  return launched();
}
