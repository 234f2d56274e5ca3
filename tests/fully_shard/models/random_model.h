#pragma once
// Random models, for comparing sharded training with one process.
//
// Each module takes two tensors, [rows, kDim], and gives two. So units have branches that a loss may not use, inputs
// that come out again, and tensors that are there twice; some modules change theirs in place.

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "nn/hooks/hooked.h"
#include "testing/draws.h"

namespace tessera::testing {

/// What a module computes of (a, b). `inner` are its children.
enum class ModelOp {
  Linear,       // a linear layer on a
  Scale,        // a * p + b, b
  Fork,         // a * p, sin(a) * q
  Swap,         // b, a
  Detach,       // a + b * p, b without history
  Repeat,       // a * p, twice
  TakesTwice,   // a * p + a, and a again
  Tied,         // a layer whose two parameters are one
  Own,          // a function of the program's own
  DoublesGrad,  // a * p, with a tensor hook
  ViewOfInput,  // a view of a, a * p + b * q
  ViewAndBase,  // a view of a * p, and that
  Overlapping,  // two views of one tensor
  AddInPlace,   // adds p to a
  MulInPlace,   // scales a
  Chain,        // one inner module after the other
  Residual,     // a + inner a, b + inner b
  Twice,        // inner(inner)
  Branches,     // a of the first inner module, b of the second
  Discard,      // calls inner, and gives (a, b)
  WithoutGrad,  // calls inner without grad mode, and adds what it gives
  Sometimes,    // inner in odd steps
};

struct ModelSpec {
  ModelOp op = ModelOp::Chain;
  std::vector<ModelSpec> inner = {};
  bool is_unit = false;
  bool is_replicated = false;      // where it is a unit
  bool cuts_columns = false;       // of parameters that have any
  int reshard_after_forward = -1;  // 0, 1, or a number of ranks; -1: as by default
  bool is_checkpointed = false;
  bool is_frozen = false;

  /// A root with modules in up to `depth` levels below it.
  static ModelSpec draw(Draws& draws, int depth);
  /// "unit Chain(Scale, checkpointed Twice(Linear))"
  std::string to_string() const;
  /// This or a module below it.
  bool has_any(const std::function<bool(const ModelSpec&)>& trait) const;
  /// The same with one module, child or mark less each.
  std::vector<ModelSpec> smaller() const;
};

struct RandomModelImpl : torch::nn::Module {
  static constexpr int64_t kDim = 5;
  using Pair = std::tuple<at::Tensor, at::Tensor>;

  explicit RandomModelImpl(const ModelSpec& spec);
  Pair forward(at::Tensor a, at::Tensor b);
  /// Of this and all modules below it.
  void set_step(int step);

 private:
  Pair call(size_t child, Pair inputs);

  ModelOp op_;
  int step_ = 0;
  at::Tensor p_, q_;
};
TESSERA_MODULE(RandomModel);

}  // namespace tessera::testing
