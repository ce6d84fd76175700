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
constexpr int FEW_WARPS = 4, FEW_THREADS = 32 * FEW_WARPS, FEW_COLUMNS = 64, FEW_STEPS = 24;
constexpr int FEW_MOST_THREADS = FEW_STEPS / 2 * 32, FEW_STAGES = 3;  // of the filter pass
constexpr int SUM_ELEMENTS = 32, SUM_SHARERS = 16;

// Of the output: 64 columns at most of `rows` rows of one image, from (y0, x0) on; `across` pieces of 16 columns.
struct FewTile {
  int64_t n;
  int32_t y0, x0, rows, columns, across;
};

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
  __device__ FewTile tile(int64_t number) const {
    const int32_t x0 = static_cast<int32_t>(number % chunks) * FEW_COLUMNS;
    const int32_t y0 = static_cast<int32_t>(number / chunks % bands) * band, columns = min(FEW_COLUMNS, out_width - x0);
    return {number / chunks / bands, y0, x0, min(band, out_height - y0), columns, (columns + 15) / 16};
  }
  // Of the filter pass: warps that make different terms, and that make the same of different pixels.
  __host__ __device__ int32_t groups() const { return (steps + 1) / 2; }
  __host__ __device__ int32_t sharers() const { return groups() <= 2 ? 4 : groups() <= 4 ? 2 : 1; }
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
  MBC_DYNAMIC_SHARED(weights);                                                   // [step][pair of tiles][lane]
  uint2* terms = reinterpret_cast<uint2*>(weights + f.steps * TILES / 2 * 32);  // of every second term: word from the
  T* image = reinterpret_cast<T*>(terms + f.steps * 8);                         // pixel, what of it counts
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
    const auto [n, y0, x0, rows, columns, across] = f.tile(tile);
    __syncthreads();  // the band before this one is done with
    fetch_band(x, image, f, n, y0, x0, f.span(across * 16));
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

// Where eight filters of a pixel's gradient lie in a row in shared memory, in 16 bytes: so that those of eight
// neighbouring pixels are in different banks.
template <int TILES>
__device__ inline int32_t place(int32_t pixel, int32_t eight) {
  return pixel * TILES + (eight ^ pixel / (8 / TILES) % TILES);
}

// The gradient of the filters: terms by filters, summed over pixels. A warp makes two tiles of 16 terms for all filters
// of the block; where there are few terms several warps share out the pixels. The gradients of output rows come through
// a ring in shared memory, FEW_STAGES - 1 rows ahead, tiles of other images included.
template <typename T, int TILES>
__global__ void __launch_bounds__(FEW_MOST_THREADS)
    few_channels_filter(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial, FewChannels f) {
  constexpr int STAGE = FEW_COLUMNS * TILES;  // of 16 bytes
  MBC_DYNAMIC_SHARED(shared);
  T* image = reinterpret_cast<T*>(shared + FEW_STAGES * STAGE);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int32_t group = warp % f.groups(), sharer = warp / f.groups();
  const int32_t first = blockIdx.y * TILES * 8;

  // What is fetched next: a row of a tile, into a stage of the ring.
  int64_t ahead = blockIdx.x;
  int32_t ahead_row = 0, ahead_stage = 0;
  FewTile coming = f.tile(ahead);
  const auto fetch_next = [&] {
    if (ahead < f.tiles) {
      const T* from = dy + ((coming.n * f.out_height + coming.y0 + ahead_row) * f.out_width + coming.x0) * f.filters + first;
      for (int32_t i = threadIdx.x; i < coming.across * 16 * TILES; i += blockDim.x) {
        const int32_t pixel = i / TILES, eight = i % TILES;
        const bool inside = pixel < coming.columns;
        const T* eight_from = from + (inside ? pixel * f.filters + eight * 8 : 0);
        uint4* to = shared + ahead_stage * STAGE + place<TILES>(pixel, eight);
        if (f.wide) {
          copy_16_bytes(to, eight_from, inside);
        } else {
          T* one = reinterpret_cast<T*>(to);
#pragma unroll
          for (int e = 0; e < 8; ++e) one[e] = inside ? eight_from[e] : from_float<T>(0.0f);
        }
      }
      ahead_stage = ahead_stage + 1 == FEW_STAGES ? 0 : ahead_stage + 1;
      if (++ahead_row == coming.rows) {
        ahead += gridDim.x;
        ahead_row = 0;
        coming = f.tile(ahead);
      }
    }
    end_of_copies();
  };

  int32_t terms[2][2];  // in the image, of the pixel at the beginning of the band; tile; row g or g + 8
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t term = (2 * group + m) * 16 + g + 8 * h, r = term / f.even_run;
      terms[m][h] = r < f.kernel_height ? r * f.pitch + term - r * f.even_run : 0;
    }
  // What this thread shows of 16 pixels by 16 filters: matrices of 8 x 8, (pixels, filters) low low, high low, low high,
  // high high.
  const int32_t shown = lane / 8 % 2 * 8 + lane % 8, shown_eight = lane / 16;
  const int32_t apart = f.stride_width * f.channels;
  float sums[2][TILES][4] = {};

#pragma unroll
  for (int s = 0; s < FEW_STAGES - 1; ++s) fetch_next();
  int32_t stage = 0;
  for (int64_t number = blockIdx.x; number < f.tiles; number += gridDim.x) {
    const FewTile tile = f.tile(number);
    __syncthreads();  // the band before this one is done with
    fetch_band(x, image, f, tile.n, tile.y0, tile.x0, f.span(tile.across * 16));
    for (int32_t row = 0; row < tile.rows; ++row) {
      wait_for_copies<FEW_STAGES - 2>();
      __syncthreads();  // everybody's copies have arrived, and the row before this one is done with
      fetch_next();
      for (int32_t piece = sharer; piece < tile.across; piece += f.sharers()) {
        const int32_t at = row * f.stride_height * f.pitch + (piece * 16 + 2 * t) * apart;
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const T* from = image + terms[m][h] + at;
            a[m][h] = word_of(from[0], from[apart]);
            a[m][2 + h] = word_of(from[8 * apart], from[9 * apart]);
          }
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
          uint32_t b[4];
          load_transposed(b, shared + stage * STAGE + place<TILES>(piece * 16 + shown, 2 * i + shown_eight));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply_add<T>(sums[m][2 * i], a[m], b[0], b[1]);
            multiply_add<T>(sums[m][2 * i + 1], a[m], b[2], b[3]);
          }
        }
      }
      stage = stage + 1 == FEW_STAGES ? 0 : stage + 1;
    }
  }

  // Of the warps that shared pixels, in order.
  float* exchanged = reinterpret_cast<float*>(shared) + group * 64 * TILES * 4 + lane;
  for (int32_t from = 1; from < f.sharers(); ++from) {
    __syncthreads();
    if (sharer == from) {
#pragma unroll
      for (int v = 0; v < 8 * TILES; ++v) exchanged[v * 32] = sums[v / 4 / TILES][v / 4 % TILES][v % 4];
    }
    __syncthreads();
    if (sharer == 0) {
#pragma unroll
      for (int v = 0; v < 8 * TILES; ++v) sums[v / 4 / TILES][v / 4 % TILES][v % 4] += exchanged[v * 32];
    }
  }
  if (sharer != 0) return;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t term = (2 * group + m) * 16 + g + 8 * h;
      if (term >= f.steps * 16) continue;
      float* to = partial + (static_cast<int64_t>(blockIdx.x) * f.steps * 16 + term) * f.filters + first + 2 * t;
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        store(to + 8 * j, Vec<float, 2>{{sums[m][j][2 * h], sums[m][j][2 * h + 1]}});
    }
}

// The parts in order: every thread some of them, then those of an element.
__global__ void few_channels_filter_sum(const float* partial, float* dw, FewChannels f, int64_t parts, bool accumulate) {
  __shared__ double sums[SUM_SHARERS][SUM_ELEMENTS];
  const int64_t size = static_cast<int64_t>(f.steps) * 16 * f.filters;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * SUM_ELEMENTS + threadIdx.x;
  const int64_t share = (parts + SUM_SHARERS - 1) / SUM_SHARERS, first = threadIdx.y * share;
  const int64_t last = first + share < parts ? first + share : parts;
  double sum = 0.0;
  if (i < size) {
#pragma unroll 8
    for (int64_t part = first; part < last; ++part) sum += partial[part * size + i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= size) return;
  const int32_t term = static_cast<int32_t>(i / f.filters), filter = static_cast<int32_t>(i - term * f.filters);
  const int32_t r = term / f.even_run, at = term - r * f.even_run;
  if (r >= f.kernel_height || at >= f.run) return;
  float* to = dw + (static_cast<int64_t>(filter) * f.kernel_height + r) * f.run + at;
  double all = accumulate ? *to : 0.0;
#pragma unroll
  for (int s = 0; s < SUM_SHARERS; ++s) all += sums[s][threadIdx.x];
  *to = static_cast<float>(all);
}

template <typename T, int TILES>
void run_few_channels_filter(const MbcCall& call, const FewChannels& f, int64_t parts, bool accumulate) {
  float* partial = out<float>(call, 3);
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(f.filters / TILES / 8));
  const unsigned threads = static_cast<unsigned>(32 * f.groups() * f.sharers());
  const int ring = FEW_STAGES * FEW_COLUMNS * TILES * 16 + f.copy * 2, exchange = f.groups() * 64 * TILES * 16;
  MBC_LAUNCH_SHARED((few_channels_filter<T, TILES>), grid, threads, ring > exchange ? ring : exchange, call.stream,
                    in<T>(call, 0), in<T>(call, 1), partial, f);
  const unsigned blocks = static_cast<unsigned>(divide_up(int64_t{16} * f.steps * f.filters, SUM_ELEMENTS));
  MBC_LAUNCH(few_channels_filter_sum, blocks, dim3(SUM_ELEMENTS, SUM_SHARERS), call.stream, partial,
             out<float>(call, 2), f, parts, accumulate);
}

template <typename T, int TILES>
void run_few_channels(const MbcCall& call, const FewChannels& f) {
  const int64_t most = multiprocessors() * 4;
  const dim3 grid(static_cast<unsigned>(f.tiles < most ? f.tiles : most), static_cast<unsigned>(f.filters / TILES / 8));
  const int shared = f.steps * (TILES / 2 * 32 * 16 + 64) + f.copy * (f.twice ? 4 : 2);
  MBC_LAUNCH_SHARED((few_channels<T, TILES>), grid, FEW_THREADS, shared, call.stream, in<T>(call, 0), in<T>(call, 1),
                    out<T>(call, 2), f);
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
