#pragma once
// Styles that redistribute a module's inputs and outputs without changing its parameters. Layouts have one entry per
// defined tensor, in forward's order. docs/semantics.md has an example and named inputs.
// Throws ValueError for options that do not match each other or the number of tensors, KeyError for an unknown input
// name, and StateError without a hook point.
// Thread safety: hooks run in the thread that calls forward. Source: torch/distributed/tensor/parallel/style.py.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parallel/parallel_style.h"

namespace tessera {

using Layouts = std::vector<std::optional<Placement>>;  // one entry per tensor; std::nullopt leaves it alone

using NamedLayouts = std::map<std::string, Placement>;  // by input name

/// Names a module's inputs in forward's order. The module derives from this class and torch::nn::Module.
class NamedInputs {
 public:
  virtual ~NamedInputs() = default;
  virtual std::vector<std::string> input_names() const = 0;
};

struct PrepareModuleInputOptions {
  Layouts input_layouts = {};          // of plain inputs; a DTensor uses its own
  Layouts desired_input_layouts = {};  // what forward receives
  /// Like the layouts above, by name; the module must be a NamedInputs.
  NamedLayouts input_kwarg_layouts = {};
  NamedLayouts desired_input_kwarg_layouts = {};
  /// Passes local tensors to forward. Gradients of replicated ones must be equal on all ranks.
  bool use_local_output = false;
  bool even_shards = false;  // see style_tensors.h
};

struct PrepareModuleOutputOptions {
  Layouts output_layouts;  // of plain outputs
  Layouts desired_output_layouts;
  bool use_local_output = true;  // return local tensors
  bool even_shards = false;
};

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

/// Options for both the inputs and outputs of a module.
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
