// Activations of mobile and later networks, and their gradients. Input and output may be the same bytes.
//
// Bytes      every operand in once, the result out once, 16 bytes at a time where operands are aligned.
// Threads    256 in a grid-stride loop; with one operand a thread has two vectors in flight.
// Limit      memory bandwidth.
#include "elementwise.cuh"

namespace mbc {

struct Elu {
  float alpha;
  __device__ float operator()(float x) const { return x > 0.0f ? x : alpha * expm1f(x); }
};
struct Mish {
  __device__ float operator()(float x) const { return x * tanhf(softplus(x)); }
};
struct Softplus {
  __device__ float operator()(float x) const { return softplus(x); }
};

// The first operand is y for elu and softplus, x for the others; the second is dy.
struct HardSigmoidBackward {
  __device__ float operator()(float x, float dy) const { return x > -3.0f && x < 3.0f ? dy / 6.0f : 0.0f; }
};
struct EluBackward {
  float alpha;
  __device__ float operator()(float y, float dy) const { return y > 0.0f ? dy : dy * (y + alpha); }
};
struct MishBackward {
  __device__ float operator()(float x, float dy) const {
    const float t = tanhf(softplus(x));
    return dy * (t + x * logistic(x) * (1.0f - t * t));
  }
};
struct SoftplusBackward {
  __device__ float operator()(float y, float dy) const { return dy * -expm1f(-y); }
};

}  // namespace mbc

extern "C" {
const char* mbc_relu6(const MbcCall& call) { return mbc::run_one(call, mbc::Relu6{}); }
const char* mbc_hardsigmoid(const MbcCall& call) { return mbc::run_one(call, mbc::HardSigmoid{}); }
const char* mbc_hardswish(const MbcCall& call) { return mbc::run_one(call, mbc::HardSwish{}); }
const char* mbc_elu(const MbcCall& call) { return mbc::run_one(call, mbc::Elu{mbc::real(call, 0)}); }
const char* mbc_mish(const MbcCall& call) { return mbc::run_one(call, mbc::Mish{}); }
const char* mbc_softplus(const MbcCall& call) { return mbc::run_one(call, mbc::Softplus{}); }
const char* mbc_relu6_backward(const MbcCall& call) { return mbc::run_two(call, mbc::Relu6Backward{}); }
const char* mbc_hardsigmoid_backward(const MbcCall& call) { return mbc::run_two(call, mbc::HardSigmoidBackward{}); }
const char* mbc_hardswish_backward(const MbcCall& call) { return mbc::run_two(call, mbc::HardSwishBackward{}); }
const char* mbc_elu_backward(const MbcCall& call) { return mbc::run_two(call, mbc::EluBackward{mbc::real(call, 0)}); }
const char* mbc_mish_backward(const MbcCall& call) { return mbc::run_two(call, mbc::MishBackward{}); }
const char* mbc_softplus_backward(const MbcCall& call) { return mbc::run_two(call, mbc::SoftplusBackward{}); }
}
