// Elementwise operations: activations and their gradients, scaling, addition and multiplication. Layout does not matter
// here, and input and output may be the same bytes: each thread reads its elements before it writes them.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop; of one operand a thread has two vectors in flight.
// Limit      memory bandwidth.
#include "elementwise.cuh"

namespace mbc {

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
// The normal distribution at x. Its left tail is bell * t * p(t) with t = 1 / (1 + slope |x|) and p a polynomial of
// degree 8, fitted to erfcx within 7e-8 of it: half as many instructions as erfcf, and one exponential for both. Tails
// keep their digits: 5e-7 relative for |x| < 3, 4e-6 for |x| < 12 (the rounding of x * x).
constexpr float INVERSE_SQRT_2PI = 0.39894228040143268f;
struct Normal {
  float bell, below;  // exp(-x^2 / 2); the share of what is less than x

  __device__ explicit Normal(float x) : bell(expf(-0.5f * x * x)) {
    constexpr int DEGREE = 8;
    constexpr float SLOPE = 0.28284271f;
    constexpr float TAIL[DEGREE + 1] = {0.225636959f,  0.226397052f,  0.202213749f,  0.192128524f, 0.0827013478f,
                                        0.0837357193f, 0.0876545683f, -0.142080441f, 0.0416126028f};
    const float t = fast_reciprocal(fmaf(SLOPE, fabsf(x), 1.0f));
    float p = TAIL[DEGREE];
#pragma unroll
    for (int k = DEGREE - 1; k >= 0; --k) p = fmaf(p, t, TAIL[k]);
    const float tail = 0.5f * t * p * bell;
    below = x > 0.0f ? 1.0f - tail : tail;
  }
};
struct Gelu {
  __device__ float operator()(float x) const { return x * Normal(x).below; }
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
    const Normal normal(x);
    return dy * fmaf(x * INVERSE_SQRT_2PI, normal.bell, normal.below);
  }
};
struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Mul {
  __device__ float operator()(float a, float b) const { return a * b; }
};

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
