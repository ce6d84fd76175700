// Functions of one element: those that device expressions (mbc/ops/device.py) call, and activations with their gradients
// as functors, with which maps and fused kernels are instantiated.
#pragma once

#include "device.cuh"

namespace mbc {

// The error is at most two units in the last place for numbers below 2^126.
__device__ inline float fast_reciprocal(float x) {
#ifdef MBC_EMULATED
  return 1.0f / x;
#else
  return __fdividef(1.0f, x);
#endif
}

__device__ inline float logistic(float x) { return fast_reciprocal(1.0f + expf(-x)); }

__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ inline float power(float x, float exponent) {
  if (exponent == 1.0f) return x;
  if (exponent == 2.0f) return x * x;
  if (exponent == -1.0f) return 1.0f / x;
  if (exponent == 0.0f) return 1.0f;
  return powf(x, exponent);
}

// gelu by tanh is x times this number: (1 + tanh(v)) / 2 is the logistic function of 2 v, whose left tail keeps its
// digits.
constexpr float GELU_SLOPE = 0.79788456080286536f, GELU_CUBE = 0.044715f;
__device__ inline float gelu_gate(float x) { return logistic(2.0f * GELU_SLOPE * (x + GELU_CUBE * x * x * x)); }

// Comparisons are written so that NaN is passed on.
__device__ inline float relu6(float x) { return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; }

// The normal distribution at x. Its left tail is bell * t * p(t) with t = 1 / (1 + slope |x|) and p a polynomial of
// degree 8, fitted to erfcx within 7e-8 of it: half as many instructions as erfcf, and one exponential for both. Tails
// keep their digits: 5e-7 relative for |x| < 3, 4e-6 for |x| < 12 (the rounding of x * x).
constexpr float INVERSE_SQRT_2PI = 0.39894228040143268f;
struct Normal {
  float bell, below;  // exp(-x^2 / 2); the probability of values below x

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

// The first operand is y for relu6, x for the others; the second is dy.
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
struct Relu6Backward {
  __device__ float operator()(float y, float dy) const { return y > 0.0f && y < 6.0f ? dy : 0.0f; }
};
struct HardSwishBackward {
  __device__ float operator()(float x, float dy) const {
    return dy * (x <= -3.0f ? 0.0f : x < 3.0f ? x / 3.0f + 0.5f : 1.0f);
  }
};

}  // namespace mbc
