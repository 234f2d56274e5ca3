#pragma once
// Styles that place a module's inputs and outputs and leave its parameters alone: at the borders of parts of a model
// that are laid out differently.
//
//   // attention(x, mask): x comes as shards of the sequence and is needed whole; the mask stays as it is
//   {"layers.*.attention", PrepareModuleInput({.input_layouts = {Shard(1), std::nullopt},
//                                              .desired_input_layouts = {Replicate(), std::nullopt}})}
//
// One entry for each tensor, in the order in which forward declares them. Arguments that hold no tensor (numbers,
// undefined or absent optional tensors) are not counted, and those that hold several (vectors, tuples, structs with
// tensor_fields) count as several, opened in order; see nn/hooks/tensor_visitor.h. A call with another number of
// tensors than entries throws, so an optional argument that is left out cannot shift layouts to the wrong tensors.
// Without any entry, as for the inputs of a PrepareModuleInputOutput that is there for outputs only, tensors are left
// alone and not counted.
//
// C++ functions have no named arguments. A module that names its own tensors can be given layouts by those names, as
// PyTorch's keyword arguments are; what is not named is left alone:
//
//   struct AttentionImpl : torch::nn::Module, NamedInputs {
//     std::vector<std::string> input_names() const override { return {"x", "mask", "positions"}; }
//     at::Tensor forward(at::Tensor x, at::Tensor mask, at::Tensor positions);
//   };
//   {"layers.*.attention", PrepareModuleInput({.input_kwarg_layouts = {{"x", Shard(1)}},
//                                              .desired_input_kwarg_layouts = {{"x", Replicate()}}})}
//
// Thread safety: as linear_styles.h.
// After the classes of the same names in torch/distributed/tensor/parallel/style.py.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parallel/parallel_style.h"

namespace tessera {

/// One entry a tensor; std::nullopt leaves it as it is.
using Layouts = std::vector<std::optional<Placement>>;

/// By the names that the module gives its inputs.
using NamedLayouts = std::map<std::string, Placement>;

/// A module that names the tensors of its forward, in the order in which forward declares them: one name each, all of
/// them given in every call. Its type derives from this beside torch::nn::Module.
class NamedInputs {
 public:
  virtual ~NamedInputs() = default;
  virtual std::vector<std::string> input_names() const = 0;
};

struct PrepareModuleInputOptions {
  /// What plain tensors are. A DTensor's own placement counts. Together with input_kwarg_layouts: of the first ones.
  Layouts input_layouts = {};
  /// What forward gets: DTensors in these placements; entries where input_layouts has some.
  Layouts desired_input_layouts = {};
  /// The same by name; for modules that are NamedInputs. Both have the same names.
  NamedLayouts input_kwarg_layouts = {};
  NamedLayouts desired_input_kwarg_layouts = {};
  /// forward gets the local tensors of those DTensors, which it may write in place where their layout has changed.
  /// Their gradients, where the placement is Replicate, must then be equal on every rank.
  bool use_local_output = false;
  /// See style_tensors.h: plain shards are cut evenly.
  bool even_shards = false;
};

struct PrepareModuleOutputOptions {
  /// What plain results of forward are.
  Layouts output_layouts;
  Layouts desired_output_layouts;
  /// The caller gets local tensors, which it may write in place where their layout has changed.
  bool use_local_output = true;
  bool even_shards = false;
};

/// Errors of all three: ValueError for options that do not fit each other (when made) and for another number of
/// tensors than entries (when called); StateError for a module without hook point; KeyError for a name that the module
/// does not have, and ValueError if it has no names (when applied, before anything is changed).
class PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareModuleInputOptions options);

  std::string name() const override { return "PrepareModuleInput"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleInputOptions options_;
};

class PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareModuleOutputOptions options);

  std::string name() const override { return "PrepareModuleOutput"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleOutputOptions options_;
};

/// Both of them on one module.
struct PrepareModuleInputOutputOptions {
  PrepareModuleInputOptions input;
  PrepareModuleOutputOptions output;
};

class PrepareModuleInputOutput : public ParallelStyle {
 public:
  explicit PrepareModuleInputOutput(PrepareModuleInputOutputOptions options);

  std::string name() const override { return "PrepareModuleInputOutput"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleInputOutputOptions options_;
};

}  // namespace tessera
