#pragma once
// Which random numbers a shard of a tensor gets.

#include <cstdint>
#include <vector>

namespace tessera {

enum class Distribution { Normal, Uniform, Bernoulli };

/// Normal of mean a and standard deviation b; Uniform over [a, b); Bernoulli of probability a.
struct DrawParameters {
  Distribution distribution = Distribution::Normal;
  double a = 0;
  double b = 1;
};

/// The shard's element at a coordinate is element whole_offset + sum of coordinate[d] * whole_strides[d] of the whole
/// tensor's memory, and element sum of coordinate[d] * local_strides[d] of the shard's. The whole tensor's memory has
/// whole_numel elements without gaps.
struct ShardOfWhole {
  std::vector<int64_t> sizes;
  std::vector<int64_t> whole_strides;
  std::vector<int64_t> local_strides;
  int64_t whole_offset = 0;
  int64_t whole_numel = 0;
};

}  // namespace tessera
