// Random numbers from a counter: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
// equal to mbc/ops/random.py. Key: the seed, low word first. Counter: the block's two words, the step's low word,
// `key`.
#pragma once

#include "device.cuh"

namespace mbc {

struct Words {
  uint32_t v[4];
};

__device__ inline Words philox(uint64_t seed, uint64_t block, uint32_t step, uint32_t key) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = step, c3 = key;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = static_cast<uint64_t>(c0) * 0xD2511F53u, right = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(right >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(right);
    c2 = static_cast<uint32_t>(left >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace mbc
