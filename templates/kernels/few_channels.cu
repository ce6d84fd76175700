// Convolutions of images with few channels (the first layer of a network) on tensor cores, channels last: the forward and
// the filter pass. Nobody asks for the gradient of an image.
//
// Libraries pad three channels to eight, so that most of what they load and multiply is zeros. Here a row of a window,
// kernel_width * channels elements, is one run of memory: the terms of a sum are those runs one after another, each
// padded to an even length only. A block keeps all weights and a band of the image in shared memory; a warp makes 16
// columns of two output rows at a time. Where a pixel starts at an odd element, whole words are read from a second copy
// of the band that lies one element further.
#include "mbc_mma.cuh"

struct FewChannelsArguments {
  int64_t type;
  int64_t rows;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t filters;
  int64_t out_height;
  int64_t out_width;
  int64_t kernel_height;
  int64_t kernel_width;
  int64_t stride_height;
  int64_t stride_width;
  int64_t pad_top;
  int64_t pad_left;
  int64_t band;  // output rows of a block, even
  int64_t parts;  // of the filter pass: blocks that share out the image
  int64_t accumulate;
};

namespace mbc {

// As in mbc/kernels/own/few_channels.py.
constexpr int FEW_WARPS = 4, FEW_THREADS = 32 * FEW_WARPS, FEW_COLUMNS = 64, FEW_ELEMENTS = 10240, FEW_STEPS = 13,
              FEW_MOST_THREADS = (FEW_STEPS + 1) / 2 * 32;

struct FewChannels {
  int32_t channels, height, width, filters, out_height, out_width, kernel_height, kernel_width, stride_height,
      stride_width, pad_top, pad_left, band;
  int32_t run, even_run;  // elements of a row of a window; padded
  int32_t steps;          // of 16 terms
  int32_t band_rows, pitch, copy;  // of the image in shared memory; elements of a row and of all rows
  bool twice, wide;  // two copies of the band; the output takes vectors
  int32_t chunks, bands;  // of the output: of FEW_COLUMNS columns and of `band` rows
  int64_t tiles;

  FewChannels(const FewChannelsArguments& a, bool forward, bool whole)
      : channels(static_cast<int32_t>(a.channels)), height(static_cast<int32_t>(a.height)),
        width(static_cast<int32_t>(a.width)), filters(static_cast<int32_t>(a.filters)),
        out_height(static_cast<int32_t>(a.out_height)), out_width(static_cast<int32_t>(a.out_width)),
        kernel_height(static_cast<int32_t>(a.kernel_height)), kernel_width(static_cast<int32_t>(a.kernel_width)),
        stride_height(static_cast<int32_t>(a.stride_height)), stride_width(static_cast<int32_t>(a.stride_width)),
        pad_top(static_cast<int32_t>(a.pad_top)), pad_left(static_cast<int32_t>(a.pad_left)),
        band(static_cast<int32_t>(a.band)) {
    run = kernel_width * channels;
    even_run = (run + 1) / 2 * 2;
    steps = (kernel_height * even_run + 15) / 16;
    band_rows = (band - 1) * stride_height + kernel_height;
    pitch = (span(FEW_COLUMNS) + 3) / 2 * 2;
    copy = band_rows * pitch;
    twice = forward && stride_width * channels % 2 != 0;
    chunks = static_cast<int32_t>(divide_up(out_width, FEW_COLUMNS));
    bands = static_cast<int32_t>(divide_up(out_height, band));
    tiles = a.rows * bands * chunks;
    wide = whole;
  }
  // Elements of an image row under so many columns of the output.
  __host__ __device__ int32_t span(int32_t columns) const {
    return ((columns - 1) * stride_width + kernel_width) * channels;
  }
};

// Two elements of the weights of one filter as a word, zeros beyond the ends.
template <typename T>
__device__ inline uint32_t weight_word(const T* filter, const FewChannels& f, int32_t term) {
  const int32_t r = term / f.even_run, at = term - r * f.even_run;
  Vec<T, 2> pair{};
  if (r < f.kernel_height) {
    pair.v[0] = filter[r * f.run + at];
    if (at + 1 < f.run) pair.v[1] = filter[r * f.run + at + 1];
  }
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// The image rows under output rows from y0 and `span` elements under columns from x0 on; zeros in the padding.
template <typename T>
__device__ inline void fetch_band(const T* x, T* image, const FewChannels& f, int64_t n, int32_t y0, int32_t x0,
                                  int32_t span) {
      for (int32_t row = threadIdx.x / 32; row < f.band_rows; row += blockDim.x / 32) {
        const int32_t from = (x0 * f.stride_width - f.pad_left) * f.channels;
        const int32_t image_y = y0 * f.stride_height - f.pad_top + row;
        const bool inside = image_y >= 0 && image_y < f.height;
        const T* line = x + (n * f.height + image_y) * f.width * f.channels + from;
        // In registers first, so that many reads are on their way at once.
        constexpr int K = 8;
        for (int32_t e = threadIdx.x % 32; e < f.pitch; e += 32 * K) {
          T read[K];
  #pragma unroll
          for (int k = 0; k < K; ++k) {
            const int32_t at = e + 32 * k;
            read[k] = inside && at < span && from + at >= 0 && from + at < f.width * f.channels ? line[at]
                                                                                                  : from_float<T>(0.0f);
          }
  #pragma unroll
          for (int k = 0; k < K; ++k) {
            const int32_t at = e + 32 * k;
            if (at < f.pitch) image[row * f.pitch + at] = read[k];
            if (f.twice && at + 1 < f.pitch) image[f.copy + row * f.pitch + at + 1] = read[k];
          }
        }
      }
}

// Filters in tiles of 8, which are permuted so that what a thread computes of a pixel are neighbours in memory: column n
// of tile j is filter n / 2 * 2 * TILES + 2 * j + n % 2.
template <typename T, int TILES>
__global__ void __launch_bounds__(FEW_THREADS, 4)
    few_channels(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, FewChannels f) {
  __shared__ uint4 weights[FEW_STEPS * TILES / 2 * 32];  // [step][pair of tiles][lane]
  __shared__ uint2 terms[FEW_STEPS * 8];                 // of every second term: word from the pixel, what of it counts
  alignas(16) __shared__ T image[FEW_ELEMENTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = blockIdx.y * TILES * 8;

  uint32_t* words = reinterpret_cast<uint32_t*>(weights);
  for (int i = threadIdx.x; i < f.steps * TILES * 64; i += FEW_THREADS) {
    const int half = i % 2, n = i / 4 % 32 / 4, pair = i / 128 % (TILES / 2), step = i / 128 / (TILES / 2);
    const int filter = first + n / 2 * 2 * TILES + 2 * (2 * pair + i / 2 % 2) + n % 2;
    words[i] = weight_word(weight + static_cast<int64_t>(filter) * f.kernel_height * f.run, f,
                           step * 16 + half * 8 + i / 4 % 4 * 2);
  }
  for (int i = threadIdx.x; i < f.steps * 8; i += FEW_THREADS) {
    const int32_t r = 2 * i / f.even_run, at = 2 * i - r * f.even_run;
    const bool inside = r < f.kernel_height;
    terms[i].x = inside ? static_cast<uint32_t>(r * f.pitch + at) / 2 : 0;
    terms[i].y = !inside ? 0 : at + 1 < f.run ? 0xffffffffu : 0xffffu;
  }

  for (int64_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x) {
    const int32_t chunk = static_cast<int32_t>(tile % f.chunks), band = static_cast<int32_t>(tile / f.chunks % f.bands);
    const int64_t n = tile / f.chunks / f.bands;
    const int32_t x0 = chunk * FEW_COLUMNS, y0 = band * f.band, columns = min(FEW_COLUMNS, f.out_width - x0);
    const int32_t across = (columns + 15) / 16, span = f.span(across * 16);
    __syncthreads();  // the band before this one is done with
    fetch_band(x, image, f, n, y0, x0, span);
    __syncthreads();

    for (int32_t piece = warp; piece < f.band / 2 * across; piece += FEW_WARPS) {
      const int32_t column = piece % across * 16 + g, row = piece / across * 2;
      const uint32_t* pixel[2][2];  // output row; column g or g + 8
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t at = (row + m) * f.stride_height * f.pitch + (column + 8 * h) * f.stride_width * f.channels;
          pixel[m][h] = reinterpret_cast<const uint32_t*>(image) + (at % 2 != 0 ? (f.copy + at + 1) / 2 : at / 2);
        }
      float sums[2][TILES][4] = {};
      for (int step = 0; step < f.steps; ++step) {
        const uint2 low = terms[step * 8 + t], high = terms[step * 8 + t + 4];
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          a[m][0] = pixel[m][0][low.x] & low.y;
          a[m][1] = pixel[m][1][low.x] & low.y;
          a[m][2] = pixel[m][0][high.x] & high.y;
          a[m][3] = pixel[m][1][high.x] & high.y;
        }
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
          const uint4 b = weights[(step * (TILES / 2) + i) * 32 + lane];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply_add<T>(sums[m][2 * i], a[m], b.x, b.y);
            multiply_add<T>(sums[m][2 * i + 1], a[m], b.z, b.w);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t out_y = y0 + row + m, out_x = x0 + column + 8 * h;
          if (out_y >= f.out_height || out_x >= f.out_width) continue;
          T* to = y + ((n * f.out_height + out_y) * f.out_width + out_x) * f.filters + first + t * 2 * TILES;
#pragma unroll
          for (int v = 0; v < TILES / 4; ++v) {
            Vec<T, 8> made;
#pragma unroll
            for (int e = 0; e < 8; ++e) made.v[e] = from_float<T>(sums[m][4 * v + e / 2][2 * h + e % 2]);
            if (f.wide) {
              store(to + 8 * v, made);
            } else {
#pragma unroll
              for (int e = 0; e < 8; ++e) to[8 * v + e] = made.v[e];
            }
          }
        }
    }
  }
}

template <typename T>
__device__ inline uint32_t word_of(const T& low, const T& high) {
  const Vec<T, 2> pair{{low, high}};
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// The gradient of the filters: terms by filters, summed over pixels. A warp makes two tiles of 16 terms for all filters
// of the block. Gradients come straight from memory, those of the next pixels while these are worked on; filter column
// n of tile j is n * TILES + j, so that what a thread reads of a pixel are neighbours.
template <typename T, int TILES>
__global__ void __launch_bounds__(FEW_MOST_THREADS, 2)
    few_channels_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial, FewChannels f) {
  alignas(16) __shared__ T image[FEW_ELEMENTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t first = blockIdx.y * TILES * 8;
  const T* terms[2][2];  // of the pixel at the beginning of the band; tile; row g or g + 8
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t term = (2 * warp + m) * 16 + g + 8 * h, r = term / f.even_run;
      terms[m][h] = image + (r < f.kernel_height ? r * f.pitch + term - r * f.even_run : 0);
    }
  const int32_t apart = f.stride_width * f.channels;
  float sums[2][TILES][4] = {};

  for (int64_t tile = blockIdx.x; tile < f.tiles; tile += gridDim.x) {
    const int32_t chunk = static_cast<int32_t>(tile % f.chunks), band = static_cast<int32_t>(tile / f.chunks % f.bands);
    const int64_t n = tile / f.chunks / f.bands;
    const int32_t x0 = chunk * FEW_COLUMNS, y0 = band * f.band, columns = min(FEW_COLUMNS, f.out_width - x0);
    const int32_t across = (columns + 15) / 16, pieces = min(f.band, f.out_height - y0) * across;
    const T* corner = dy + ((n * f.out_height + y0) * f.out_width + x0) * f.filters + first + g * TILES;
    // Of pixels 2t, 2t + 1, 2t + 8 and 2t + 9 of sixteen.
    const auto fetch = [&](Vec<T, TILES>(&read)[4], int32_t piece) {
      const int32_t row = piece / across, column = (piece - row * across) * 16 + 2 * t;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int32_t at = column + k % 2 + k / 2 * 8;
        const T* from = corner + (static_cast<int64_t>(row) * f.out_width + at) * f.filters;
        if (at < columns && f.wide) {
          read[k] = load<TILES>(from);
        } else {
#pragma unroll
          for (int j = 0; j < TILES; ++j) read[k].v[j] = at < columns ? from[j] : from_float<T>(0.0f);
        }
      }
    };
    Vec<T, TILES> next[4];
    fetch(next, 0);
    __syncthreads();  // the band before this one is done with
    fetch_band(x, image, f, n, y0, x0, f.span(across * 16));
    __syncthreads();
    for (int32_t piece = 0; piece < pieces; ++piece) {
      uint32_t b[TILES][2];
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        b[j][0] = word_of(next[0].v[j], next[1].v[j]);
        b[j][1] = word_of(next[2].v[j], next[3].v[j]);
      }
      if (piece + 1 < pieces) fetch(next, piece + 1);
      const int32_t row = piece / across, column = (piece - row * across) * 16 + 2 * t;
      const int32_t at = row * f.stride_height * f.pitch + column * apart;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const T* from = terms[m][h] + at;
          a[h] = word_of(from[0], from[apart]);
          a[2 + h] = word_of(from[8 * apart], from[9 * apart]);
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) multiply_add<T>(sums[m][j], a, b[j][0], b[j][1]);
      }
    }
  }

#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t term = (2 * warp + m) * 16 + g + 8 * h;
      if (term >= f.steps * 16) continue;
      float* to = partial + (static_cast<int64_t>(blockIdx.x) * f.steps * 16 + term) * f.filters + first + 2 * t * TILES;
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < TILES; ++j) to[e * TILES + j] = sums[m][j][2 * h + e];
    }
}

// The parts in order.
__global__ void few_channels_filter_sum(const float* partial, float* dw, FewChannels f, int64_t parts, bool accumulate) {
  const int64_t size = static_cast<int64_t>(f.steps) * 16 * f.filters, i = thread_index();
  if (i >= size) return;
  const int32_t term = static_cast<int32_t>(i / f.filters), filter = static_cast<int32_t>(i - term * f.filters);
  const int32_t r = term / f.even_run, at = term - r * f.even_run;
  if (r >= f.kernel_height || at >= f.run) return;
  float* to = dw + (static_cast<int64_t>(filter) * f.kernel_height + r) * f.run + at;
  double sum = accumulate ? *to : 0.0;
#pragma unroll 8
  for (int64_t part = 0; part < parts; ++part) sum += partial[part * size + i];
  *to = static_cast<float>(sum);
}

template <typename T, int TILES>
void run_few_channels_filter(const MbcCall& call, const FewChannels& f, int64_t parts, bool accumulate) {
  float* partial = out<float>(call, 3);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(f.filters / TILES / 8));
  MBC_LAUNCH((few_channels_filter<T, TILES>), grid, (f.steps + 1) / 2 * 32, call.stream, in<T>(call, 0), in<T>(call, 1),
             partial, f);
  constexpr int SUM_THREADS = 64;  // few outputs, many terms: as many multiprocessors as can be had
  const unsigned blocks = static_cast<unsigned>(divide_up(int64_t{16} * f.steps * f.filters, SUM_THREADS));
  MBC_LAUNCH(few_channels_filter_sum, blocks, SUM_THREADS, call.stream, partial, out<float>(call, 2), f, parts,
             accumulate);
}

template <typename T, int TILES>
void run_few_channels(const MbcCall& call, const FewChannels& f) {
  const int64_t most = multiprocessors() * 4;
  const dim3 grid(static_cast<unsigned>(f.tiles < most ? f.tiles : most), static_cast<unsigned>(f.filters / TILES / 8));
  MBC_LAUNCH((few_channels<T, TILES>), grid, FEW_THREADS, call.stream, in<T>(call, 0), in<T>(call, 1), out<T>(call, 2),
             f);
}

}  // namespace mbc

extern "C" const char* mbc_convolution_few_channels(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FewChannelsArguments>(call);
#if MBC_WORKING == 0
  return "tensor cores take no fp32";
#else
  if (a.type != MBC_WORKING) return "tensor cores take no fp32";
  const FewChannels f(a, true, aligned(out<MbcWorking>(call, 2), 16));
  if (f.filters % 64 == 0)
    run_few_channels<MbcWorking, 8>(call, f);
  else
    run_few_channels<MbcWorking, 4>(call, f);
  return launched();
#endif
}

extern "C" const char* mbc_convolution_few_channels_filter(const MbcCall& call) {
  using namespace mbc;
  const auto& a = arguments<FewChannelsArguments>(call);
#if MBC_WORKING == 0
  return "tensor cores take no fp32";
#else
  if (a.type != MBC_WORKING) return "tensor cores take no fp32";
  const FewChannels f(a, false, aligned(in<MbcWorking>(call, 1), 16));
  if (f.filters % 64 == 0)
    run_few_channels_filter<MbcWorking, 8>(call, f, a.parts, a.accumulate != 0);
  else
    run_few_channels_filter<MbcWorking, 4>(call, f, a.parts, a.accumulate != 0);
  return launched();
#endif
}
