// Elementwise operations: activations and their gradients, scaling, addition and multiplication. Layout does not matter
// here, and input and output may be the same bytes: each thread reads its elements before it writes them.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop; of one operand a thread has two vectors in flight.
// Limit      memory bandwidth.
#include "device.cuh"

struct MapArguments {
  int64_t type;
  int64_t elements;
};

namespace mbc {

template <typename T, typename F>
__global__ void map_one(const T* x, T* y, int64_t vectors, int64_t elements, F f) {
  constexpr int N = WIDTH<T>;
  const int64_t stride = thread_count();
  int64_t i = thread_index();
  // Two vectors in flight a thread, both read before either is written.
  for (; i + stride < vectors; i += 2 * stride) {
    Vec<T, N> a = load<N>(x + i * N), b = load<N>(x + (i + stride) * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      a.v[j] = from_float<T>(f(to_float(a.v[j])));
      b.v[j] = from_float<T>(f(to_float(b.v[j])));
    }
    store(y + i * N, a);
    store(y + (i + stride) * N, b);
  }
  if (i < vectors) {
    Vec<T, N> a = load<N>(x + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) a.v[j] = from_float<T>(f(to_float(a.v[j])));
    store(y + i * N, a);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride) y[e] = from_float<T>(f(to_float(x[e])));
}

template <typename T, typename F>
__global__ void map_two(const T* x, const T* z, T* y, int64_t vectors, int64_t elements, F f) {
  constexpr int N = WIDTH<T>;
  const int64_t stride = thread_count();
  for (int64_t i = thread_index(); i < vectors; i += stride) {
    Vec<T, N> a = load<N>(x + i * N);
    const Vec<T, N> b = load<N>(z + i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) a.v[j] = from_float<T>(f(to_float(a.v[j]), to_float(b.v[j])));
    store(y + i * N, a);
  }
  for (int64_t e = vectors * N + thread_index(); e < elements; e += stride)
    y[e] = from_float<T>(f(to_float(x[e]), to_float(z[e])));
}

template <typename F>
const char* run_one(const MbcCall& call, F f) {
  const auto& a = arguments<MapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T* x = in<T>(call, 0);
    T* y = out<T>(call, 1);
    const int64_t vectors = aligned(x, 16) && aligned(y, 16) ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((map_one<T, F>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, x, y, vectors,
               a.elements, f);
  });
  return launched();
}

template <typename F>
const char* run_two(const MbcCall& call, F f) {
  const auto& a = arguments<MapArguments>(call);
  MBC_FOR_TYPE(a.type, T, {
    const T *x = in<T>(call, 0), *z = in<T>(call, 1);
    T* y = out<T>(call, 2);
    const int64_t vectors = aligned(x, 16) && aligned(z, 16) && aligned(y, 16) ? a.elements / WIDTH<T> : 0;
    MBC_LAUNCH((map_two<T, F>), blocks_for(vectors > 0 ? vectors : a.elements), THREADS, call.stream, x, z, y, vectors,
               a.elements, f);
  });
  return launched();
}

__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// Comparisons are written so that a NaN comes through.
struct Relu {
  __device__ float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};
struct LeakyRelu {
  float slope;
  __device__ float operator()(float x) const { return x < 0.0f ? slope * x : x; }
};
struct Sigmoid {
  __device__ float operator()(float x) const { return logistic(x); }
};
struct Tanh {
  __device__ float operator()(float x) const { return tanhf(x); }
};
struct Silu {
  __device__ float operator()(float x) const { return x * logistic(x); }
};
constexpr float INVERSE_SQRT_2 = 0.70710678118654752f, INVERSE_SQRT_2PI = 0.39894228040143268f;
// erfc rather than 1 + erf: the left tail keeps its digits.
struct Gelu {
  __device__ float operator()(float x) const { return 0.5f * x * erfcf(-x * INVERSE_SQRT_2); }
};
struct Scale {
  float factor, offset;
  __device__ float operator()(float x) const { return fmaf(factor, x, offset); }
};

// The first operand is y for relu, leaky_relu, sigmoid and tanh, x for silu and gelu; the second is dy.
struct ReluBackward {
  __device__ float operator()(float y, float dy) const { return y > 0.0f ? dy : 0.0f; }
};
struct LeakyReluBackward {
  float slope;
  __device__ float operator()(float y, float dy) const { return y > 0.0f ? dy : slope * dy; }
};
struct SigmoidBackward {
  __device__ float operator()(float y, float dy) const { return dy * y * (1.0f - y); }
};
struct TanhBackward {
  __device__ float operator()(float y, float dy) const { return dy * (1.0f - y * y); }
};
struct SiluBackward {
  __device__ float operator()(float x, float dy) const {
    const float s = logistic(x);
    return dy * s * (1.0f + x * (1.0f - s));
  }
};
struct GeluBackward {
  __device__ float operator()(float x, float dy) const {
    return dy * (0.5f * erfcf(-x * INVERSE_SQRT_2) + x * INVERSE_SQRT_2PI * expf(-0.5f * x * x));
  }
};
struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Mul {
  __device__ float operator()(float a, float b) const { return a * b; }
};

inline float real(const MbcCall& call, int index) { return static_cast<float>(call.reals[index]); }

}  // namespace mbc

extern "C" {
const char* mbc_relu(const MbcCall& call) { return mbc::run_one(call, mbc::Relu{}); }
const char* mbc_leaky_relu(const MbcCall& call) { return mbc::run_one(call, mbc::LeakyRelu{mbc::real(call, 0)}); }
const char* mbc_sigmoid(const MbcCall& call) { return mbc::run_one(call, mbc::Sigmoid{}); }
const char* mbc_tanh(const MbcCall& call) { return mbc::run_one(call, mbc::Tanh{}); }
const char* mbc_silu(const MbcCall& call) { return mbc::run_one(call, mbc::Silu{}); }
const char* mbc_gelu(const MbcCall& call) { return mbc::run_one(call, mbc::Gelu{}); }
const char* mbc_scale(const MbcCall& call) {
  return mbc::run_one(call, mbc::Scale{mbc::real(call, 0), mbc::real(call, 1)});
}
const char* mbc_relu_backward(const MbcCall& call) { return mbc::run_two(call, mbc::ReluBackward{}); }
const char* mbc_leaky_relu_backward(const MbcCall& call) {
  return mbc::run_two(call, mbc::LeakyReluBackward{mbc::real(call, 0)});
}
const char* mbc_sigmoid_backward(const MbcCall& call) { return mbc::run_two(call, mbc::SigmoidBackward{}); }
const char* mbc_tanh_backward(const MbcCall& call) { return mbc::run_two(call, mbc::TanhBackward{}); }
const char* mbc_silu_backward(const MbcCall& call) { return mbc::run_two(call, mbc::SiluBackward{}); }
const char* mbc_gelu_backward(const MbcCall& call) { return mbc::run_two(call, mbc::GeluBackward{}); }
const char* mbc_add(const MbcCall& call) { return mbc::run_two(call, mbc::Add{}); }
const char* mbc_mul(const MbcCall& call) { return mbc::run_two(call, mbc::Mul{}); }
}
