#pragma once
// Proves a sharding rule right: runs a call on plain tensors and on DTensors under every combination of
// placements, and compares values and gradients.
//
//   check_op({.name = "mm",
//             .inputs = {{{5, 3}}, {{3, 4}}},
//             .call = [](const Tensors& x) -> Tensors { return {x[0].mm(x[1])}; }});
//
// Each input is Replicate, Shard of each of its dims and (if floating) a pending sum, in every combination with the
// other inputs, on 1-D meshes of 1 to 4 ranks and, sampled, on a mesh of 2 x 2, on every device of test_devices().
// Inputs are float64 and drawn before any rank starts, so that every rank has the same. A failure names the call,
// sizes, placements, device, ranks and seed.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"
#include "testing/tensor_matchers.h"

namespace tessera {

using Tensors = std::vector<at::Tensor>;
using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

struct Input {
  enum class Kind { Normal, Positive, Index, Mask, Probability };

  std::vector<int64_t> sizes;
  Kind kind = Kind::Normal;
  int64_t limit = 0;  // Index: 0 <= value < limit
};

inline Input positive(std::vector<int64_t> sizes) {
  return {std::move(sizes), Input::Kind::Positive};
}
inline Input probability(std::vector<int64_t> sizes) {
  return {std::move(sizes), Input::Kind::Probability};
}
inline Input mask(std::vector<int64_t> sizes) {
  return {std::move(sizes), Input::Kind::Mask};
}
inline Input indices(std::vector<int64_t> sizes, int64_t limit) {
  return {std::move(sizes), Input::Kind::Index, limit};
}

struct OpCase {
  std::string name;
  std::vector<Input> inputs;
  std::function<Tensors(const Tensors&)> call;
  /// A written tensor may have placements that the op cannot keep: NotImplementedError is then right as well, but on
  /// no mesh for copies alone, nor for every cut of every input.
  bool in_place = false;
  bool gradients = true;
  uint64_t seed = 1;
  /// For ops that compute something else on a plain tensor of a GPU.
  bool cpu_only = false;
};

/// The plain `value`, the same on every rank, as a DTensor. Along each axis of a pending sum the first rank holds
/// value - (n - 1) * other and the rest hold `other`, so that every rank's term matters; so with averages and products,
/// and a maximum or minimum is the first rank's. Pending axes have one reduction. Collective.
at::Tensor place(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements);

/// How this rank's part of `actual` differs from that of the plain `expected`, empty if it does not. Without
/// communication, except for partial placements, whose terms mean nothing alone: then the whole is compared.
/// Collective.
std::string shard_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance);

/// Throws ExpectationError at the first difference.
void check_op(const OpCase& test);

/// check_op for each. The names of all cases that failed are listed, with the first failure of each.
void check_ops(const std::vector<OpCase>& tests);

}  // namespace tessera
