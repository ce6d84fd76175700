// The decision at the end of a step: whether the step counts, and the loss scale of the next step.
#pragma once

#include "mbc_control.h"
#include "device.cuh"

namespace mbc {

constexpr int TENSORS = 64;  // gradients of one launch; the kernel's arguments hold the list

constexpr int CONTROL_BYTES = 256;

// The next version of a control block. `scaled`: the loss scale is dynamic (fp16); `accumulate`: the number of
// mini-batches over which the gradients are sums.
__device__ inline MbcControl decided(MbcControl control, bool proceed, bool scaled, int64_t accumulate) {
  control.proceed = proceed ? 1 : 0;
  control.gradient_scale = control.loss_scale * static_cast<float>(accumulate);  // before the scale changes
  if (proceed) {
    ++control.updates;
    ++control.since_growth;
  } else {
    ++control.skipped;
  }
  if (scaled && !proceed) {
    control.loss_scale *= MBC_SCALE_BACKOFF;
    control.since_growth = 0;
  } else if (scaled && control.since_growth >= MBC_GROWTH_INTERVAL) {
    control.loss_scale *= MBC_SCALE_GROWTH;
    control.since_growth = 0;
  }
  return control;
}

}  // namespace mbc
