#pragma once
// Random programs of tensor ops, for comparing DTensors with plain tensors.
//
// A program is drawn from a seed: inputs with sizes (also uneven, 1 and 0), and steps that each make one value of
// earlier ones. It runs on plain tensors and on DTensors alike, so that every value and every gradient of the sharded
// run can be compared with the plain one.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "testing/draws.h"

namespace tessera {

using Tensors = std::vector<at::Tensor>;

/// One op: a value made of earlier values of the program.
struct Step {
  std::string text;           // "v0.sum({1}, true)"
  std::vector<size_t> reads;  // numbers of the values
  std::function<at::Tensor(const Tensors& read)> run;
};

/// A step that fits the values so far; none if the op drawn fits none of them.
std::optional<Step> draw_step(Draws& draws, const Tensors& values);

struct RandomProgram {
  uint64_t seed;
  std::vector<std::vector<int64_t>> input_sizes;
  std::vector<Step> steps;
  Tensors values;  // of the plain run: inputs (leaves that require gradients), then one value a step
  /// gradients_of() the inputs, and for a fourth of the programs those of the gradients. As far as autograd takes it
  /// and they are finite: not where a program writes to what a gradient needs.
  std::vector<Tensors> gradients;

  static RandomProgram draw(uint64_t seed);

  /// The steps on other inputs: all values.
  Tensors run(const Tensors& inputs) const;
  /// The steps that lead to value `last`, one a line; all of them without one.
  std::string describe(size_t last = SIZE_MAX) const;

 private:
  void differentiate(size_t times);
};

/// The gradients of `inputs` for the sum of the squares of all floating `values` that have one; undefined where an
/// input has none. With `create_graph` they have gradients themselves.
Tensors gradients_of(const Tensors& inputs, const Tensors& values, bool create_graph);

}  // namespace tessera
