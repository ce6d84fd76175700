// Elementwise operations: activations and their gradients, scaling, addition and multiplication. The layout does not
// matter, and input and output may be the same bytes: each thread reads its elements before it writes them.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop; with one operand a thread has two vectors in flight.
// Limit      memory bandwidth.
#include "elementwise.cuh"

namespace mbc {

// Comparisons are written so that NaN is passed on.
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
struct Scale {
  float factor, offset;
  __device__ float operator()(float x) const { return fmaf(factor, x, offset); }
};

// The first operand is y, the second is dy.
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
