// Image augmentation for a network's input: a crop of each image of bytes, resized, mirrored, recoloured and
// normalized, in one pass. The random numbers of an image are a function of the seed, the step and the image's row in
// the mini-batch of all ranks (Philox, mbc/ops/augment.py), so that division, recomputation and resuming change
// nothing.
//
// Bytes      the box of each image in once (1 byte for each element), the crop out once in the network's type and layout.
// Threads    256; `parts` blocks for each image. The first thread of a block draws the image's parameters, in double
//            precision if they include a share of its area; then a thread computes all channels (at most 4) of a pixel.
// Shared     the drawn parameters.
// Limit      memory bandwidth, and narrow accesses: bytes in, with channels last 2 bytes out.
#include "mbc_control.h"
#include "philox.cuh"
#include "augment_arguments.h"
#include "augment_operands.h"

namespace mbc {

constexpr int MOST_IMAGE_CHANNELS = 4;  // as in mbc/ops/augment.py

// The part of an image that is shown: a box, which may reach beyond the image.
struct ImageView {
  int64_t top, left, height, width;
  float brightness, contrast, saturation;
  bool mirrored;
};

// Ranges: the largest distance of factors from 1; the least share of the area and its range; likewise for the logarithm
// of the ratio.
struct AugmentRanges {
  double brightness, contrast, saturation, area, area_range, ratio, ratio_range;
};

struct Normalization {
  float scale[MOST_IMAGE_CHANNELS], shift[MOST_IMAGE_CHANNELS];
};

__device__ inline double share_of(uint32_t word) { return static_cast<double>(word >> 8) * (1.0 / 16777216.0); }

__device__ inline float factor_of(uint32_t word, double reach) {
  return static_cast<float>(1.0 + reach * (2.0 * share_of(word) - 1.0));
}

__device__ inline int64_t offset_of(uint32_t word, int64_t choices) {
  return static_cast<int64_t>((static_cast<uint64_t>(word) * static_cast<uint64_t>(choices)) >> 32);
}

// `control` nullptr: the centre crop.
__device__ inline ImageView view_of(const AugmentArguments& a, const AugmentRanges& ranges, const MbcControl* control,
                                    int64_t n) {
  ImageView view{0, 0, a.crop_height, a.crop_width, 1.0f, 1.0f, 1.0f, false};
  if (control == nullptr) {
    // Rounded down even if the crop reaches beyond the image.
    view.top = (a.height - a.crop_height) >> 1;
    view.left = (a.width - a.crop_width) >> 1;
    return view;
  }
  const uint64_t row = control->first_row + static_cast<uint64_t>(a.first_row + n);
  const uint32_t step = static_cast<uint32_t>(control->step), key = static_cast<uint32_t>(a.key);
  const Words low = philox(control->global_seed, 2 * row, step, key);
  const Words high = philox(control->global_seed, 2 * row + 1, step, key);
  if (a.scaled != 0) {
    const double pixels = static_cast<double>(a.height * a.width) * (ranges.area + ranges.area_range * share_of(high.v[2]));
    const double wide = exp(ranges.ratio + ranges.ratio_range * share_of(high.v[3]));
    view.height = min(a.height, max(int64_t{1}, static_cast<int64_t>(rint(sqrt(pixels / wide)))));
    view.width = min(a.width, max(int64_t{1}, static_cast<int64_t>(rint(sqrt(pixels * wide)))));
  }
  view.mirrored = a.flip != 0 && low.v[0] >= 0x80000000u;
  view.top = offset_of(low.v[1], a.height + 2 * a.pad - view.height + 1) - a.pad;
  view.left = offset_of(low.v[2], a.width + 2 * a.pad - view.width + 1) - a.pad;
  view.brightness = factor_of(low.v[3], ranges.brightness);
  view.contrast = factor_of(high.v[0], ranges.contrast);
  view.saturation = factor_of(high.v[1], ranges.saturation);
  return view;
}

// Two pixels along an axis, relative to the box, and the share of the second.
struct BoxTap {
  int64_t first, second;
  float share;
};

__device__ inline BoxTap box_tap(int64_t position, int64_t size, int64_t crop) {
  if (size == crop) return {position, position, 0.0f};
  const int64_t at = max((2 * position + 1) * size - crop, int64_t{0}), unit = 2 * crop, first = at / unit;
  return {first, min(first + 1, size - 1), static_cast<float>(at - first * unit) / static_cast<float>(unit)};
}

// A resized box is inside the image; other boxes may reach beyond it, where pixels are 0.
struct Bytes {
  const uint8_t* image;
  int64_t height, width, y_stride, x_stride, c_stride;

  __device__ float at(int64_t c, int64_t y, int64_t x) const {
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;
    return inside ? static_cast<float>(image[c * c_stride + y * y_stride + x * x_stride]) : 0.0f;
  }
};

template <typename T>
__global__ void augment(const uint8_t* x, const MbcControl* control, T* y, AugmentArguments a, AugmentRanges ranges,
                        Normalization normal) {
  __shared__ ImageView shared;
  const int64_t n = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  if (threadIdx.x == 0) shared = view_of(a, ranges, control, n);
  __syncthreads();
  const ImageView view = shared;
  const int64_t pixels = a.crop_height * a.crop_width, x_stride = a.channels_last != 0 ? a.channels : 1;
  const Bytes bytes{x + n * a.channels * a.height * a.width, a.height, a.width, a.width * x_stride, x_stride,
                    a.channels_last != 0 ? 1 : a.height * a.width};
  const bool last = a.layout == MBC_CHANNELS_LAST, resized = view.height != a.crop_height || view.width != a.crop_width;
  T* image = y + n * a.channels * pixels;
  for (int64_t i = part * THREADS + threadIdx.x; i < pixels; i += a.parts * THREADS) {
    const int64_t row = i / a.crop_width, column = i - row * a.crop_width;
    const int64_t shown = view.mirrored ? a.crop_width - 1 - column : column;
    float v[MOST_IMAGE_CHANNELS];
    if (!resized) {
#pragma unroll
      for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
        if (c < a.channels) v[c] = bytes.at(c, view.top + row, view.left + shown);
    } else {
      const BoxTap ty = box_tap(row, view.height, a.crop_height), tx = box_tap(shown, view.width, a.crop_width);
      const int64_t y0 = view.top + ty.first, y1 = view.top + ty.second;
      const int64_t x0 = view.left + tx.first, x1 = view.left + tx.second;
#pragma unroll
      for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
        if (c < a.channels) {
          const float left = bytes.at(c, y0, x0) * (1.0f - ty.share) + bytes.at(c, y1, x0) * ty.share;
          const float right = bytes.at(c, y0, x1) * (1.0f - ty.share) + bytes.at(c, y1, x1) * ty.share;
          v[c] = left * (1.0f - tx.share) + right * tx.share;
        }
    }
#pragma unroll
    for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
      if (c < a.channels) v[c] *= 1.0f / 255.0f;
    if (a.jitters != 0) {
#pragma unroll
      for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
        if (c < a.channels) v[c] = (v[c] * view.brightness - 0.5f) * view.contrast + 0.5f;
      if (a.channels == 3) {
        const float grey = 0.299f * v[0] + 0.587f * v[1] + 0.114f * v[2];
#pragma unroll
        for (int c = 0; c < 3; ++c) v[c] = grey + view.saturation * (v[c] - grey);
      }
#pragma unroll
      for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
        if (c < a.channels) v[c] = fminf(fmaxf(v[c], 0.0f), 1.0f);
    }
#pragma unroll
    for (int c = 0; c < MOST_IMAGE_CHANNELS; ++c)
      if (c < a.channels) image[last ? i * a.channels + c : c * pixels + i] = from_float<T>(v[c] * normal.scale[c] - normal.shift[c]);
  }
}

inline const char* run_augment(const MbcCall& call, const AugmentOperands& at) {
  const auto& a = arguments<AugmentArguments>(call);
  const double* r = call.reals;
  const AugmentRanges ranges{r[0], r[1], r[2], r[3], r[4], r[5], r[6]};
  Normalization normal{};
  for (int64_t c = 0; c < a.channels; ++c) {
    normal.scale[c] = static_cast<float>(r[7 + c]);
    normal.shift[c] = static_cast<float>(r[7 + a.channels + c]);
  }
  MBC_FOR_TYPE(a.type, T, {
    MBC_LAUNCH((augment<T>), static_cast<unsigned>(a.rows * a.parts), THREADS, call.stream,
               at.image.as<const uint8_t>(), at.control.as<const MbcControl>(), at.y.as<T>(), a, ranges, normal);
  });
  return launched();
}

}  // namespace mbc

extern "C" const char* mbc_augment(const MbcCall& call) {
  return mbc::run_augment(call, mbc::operands_of_augment(call));
}

extern "C" const char* mbc_centre_crop(const MbcCall& call) {
  return mbc::run_augment(call, mbc::operands_of_centre_crop(call));
}
