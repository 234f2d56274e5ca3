#pragma once
// Describes the random numbers of a shard.

#include <cstdint>
#include <vector>

namespace tessera {

enum class Distribution { Normal, Uniform, Bernoulli };

/// Parameters: Normal has mean a and standard deviation b, Uniform is over [a, b), Bernoulli has probability a.
struct DrawParameters {
  Distribution distribution = Distribution::Normal;
  double a = 0;
  double b = 1;
};

/// Location of a shard in the whole tensor. A coordinate is element whole_offset + sum(coordinate[d] *
/// whole_strides[d]) of the whole tensor's memory, which has whole_numel elements without gaps, and sum(coordinate[d] *
/// local_strides[d]) of the shard's.
struct ShardOfWhole {
  std::vector<int64_t> sizes;
  std::vector<int64_t> whole_strides;
  std::vector<int64_t> local_strides;
  int64_t whole_offset = 0;
  int64_t whole_numel = 0;
};

}  // namespace tessera
