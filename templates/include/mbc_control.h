// The control block (mbc/ir/control.py): values that change from step to step. 256 bytes in the arena.
#pragma once

#include <cstdint>

struct MbcControl {
  // Written by the host before every step.
  uint64_t step;
  uint64_t seed;
  double learning_rate;
  uint32_t training;
  uint32_t accumulated;
  // Written by the device.
  float loss_scale;
  uint32_t proceed;
  uint32_t updates;
  uint32_t skipped;
  uint32_t since_growth;
  float gradient_scale;  // the loss scale before `guard` changed it, by which updates divide
  // Written by the host once.
  uint64_t global_seed;
  uint64_t first_row;
  uint32_t rank;
};

constexpr float MBC_SCALE_GROWTH = 2.0f;
constexpr float MBC_SCALE_BACKOFF = 0.5f;
constexpr uint32_t MBC_GROWTH_INTERVAL = 2000;
