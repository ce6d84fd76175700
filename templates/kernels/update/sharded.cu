// A sharded optimizer: this rank's part of each parameter (mbc/ops/shard.py), one or many in few launches.
//
// Bytes      for each part: parameter, gradient and states in, the parameter's part and states out. The parameter is
//            whole, and the gradient may be: they are read from the beginning of this rank's part, which the control
//            block holds.
// Tile       as in multi_tensor.cu: chunks of 4,096 elements of a part, one for each block. In the padding of a part
//            states do not change, and the new parameter is zero.
// Threads    256, four vectors of four elements each.
// Limit      memory bandwidth.
//
// Integers of a call: the structure, then `FIELDS` integers for every tensor: the elements of its part, those of the
// whole, whether the gradient is whole, then the numbers of the pointers to its operands, the part's new one last.
#include "multi_tensor.cuh"

namespace mbc {

struct Sharded {
  const float *p[MOST_TENSORS], *g[MOST_TENSORS];
  float *a[MOST_TENSORS], *b[MOST_TENSORS], *p_out[MOST_TENSORS];
  int64_t whole[MOST_TENSORS];  // elements
  bool whole_gradient[MOST_TENSORS];
};

template <typename Rule>
__global__ void sharded_update(Chunks chunks, Sharded all, const MbcControl* control,
                               typename Rule::Settings settings) {
  const Rule rule(settings, control);
  const int n = chunks.tensor();
  const int64_t whole = all.whole[n], first = min(control->rank * chunks.elements[n], whole);
  const int64_t begin = chunks.begin(n), end = min(chunks.end(n), whole - first);
  for (int64_t i = max(begin, whole - first) + threadIdx.x; i < chunks.end(n); i += THREADS) all.p_out[n][i] = 0.0f;
  if (begin >= end) return;
  const Tensor t{all.p[n] + first, all.g[n] + (all.whole_gradient[n] ? first : 0), all.a[n], all.b[n],
                 all.p_out[n], all.a[n], all.b[n]};
  update_chunk(t, rule, begin, end, reinterpret_cast<uintptr_t>(t.p_out));
}

template <typename Rule>
const char* run_sharded(const MbcCall& call, const typename Rule::Settings& settings) {
  return run_updates<6 + Rule::READS>(
      call, sharded_update<Rule>, settings, [](Sharded& all, int slot, const int64_t* own, auto at) {
        all.whole[slot] = own[1];
        all.whole_gradient[slot] = own[2] != 0;
        all.p[slot] = at(own[3]);
        all.g[slot] = at(own[4]);
        all.a[slot] = at(own[5]);
        all.b[slot] = Rule::READS > 1 ? at(own[6]) : nullptr;
        all.p_out[slot] = at(own[5 + Rule::READS]);
      });
}

}  // namespace mbc

// Updates of one parameter use these launchers, too.
extern "C" const char* mbc_multi_tensor_sgd_part(const MbcCall& call) {
  using namespace mbc;
  return run_sharded<Sgd<true>>(call, sgd_settings(call, arguments<MultiTensorUpdateArguments>(call).nesterov != 0));
}

extern "C" const char* mbc_multi_tensor_adamw_part(const MbcCall& call) {
  using namespace mbc;
  return run_sharded<Adamw>(call, adamw_settings(call));
}
