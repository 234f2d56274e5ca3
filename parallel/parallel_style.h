#pragma once
// Interface of tensor-parallel styles: how one module's parameters, inputs and outputs are placed on a mesh axis.
// Ready-made: linear_styles.h, sequence_parallel.h, prepare_module.h. docs/semantics.md shows how to write one.
// Ownership: styles are values. A hook must not own its module, which would be a reference cycle.
// Thread safety: const functions are thread-safe; apply() is for one thread per rank.
// Source: ParallelStyle in torch/distributed/tensor/parallel/style.py.

#include <torch/nn/module.h>

#include <concepts>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

/// Placement that a style requests for a parameter or buffer.
struct StyleClaim {
  std::string style;  // ParallelStyle::describe
  Placement placement;
};
using StyleClaims = std::map<const c10::TensorImpl*, StyleClaim>;

/// Module that a style is applied to.
struct StyleTarget {
  torch::nn::Module& module;
  std::string path;                   // below the module given to parallelize_module: "layers.0.wq"; "" is that module
  DeviceMesh mesh;                    // 1-D
  DistributeOptions distribute = {};  // source rank of the values
  std::shared_ptr<StyleClaims> claims = nullptr;  // of the whole plan; check_style_parameter updates it
};

class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;

  virtual std::string name() const = 0;  // used in errors: "ColwiseParallel"
  /// Throws if the style cannot be applied. Changes nothing, does not communicate, and runs for the whole plan first.
  virtual void check(const StyleTarget& target) const;
  /// Distributes the parameters and registers hooks. All ranks must call it.
  virtual void apply(const StyleTarget& target) const = 0;

  /// Returns the style and module for errors, such as `ColwiseParallel("layers.0.wq")`.
  std::string describe(const StyleTarget& target) const;
};

/// Holds any style; copies share it.
class AnyStyle {
 public:
  template <std::derived_from<ParallelStyle> Style>
  AnyStyle(Style style) : style_(std::make_shared<const Style>(std::move(style))) {}  // NOLINT: a plan holds styles

  const ParallelStyle& operator*() const { return *style_; }
  const ParallelStyle* operator->() const { return style_.get(); }

 private:
  std::shared_ptr<const ParallelStyle> style_;
};

/// Maps path patterns (path_pattern.h) to styles; the path "" is the module given to parallelize_module.
class ParallelPlan {
 public:
  struct Entry {
    std::string path;
    AnyStyle style;
  };

  ParallelPlan() = default;
  ParallelPlan(std::initializer_list<Entry> entries) : entries_(entries) {}
  /// Applies one style to the module itself.
  template <std::derived_from<ParallelStyle> Style>
  ParallelPlan(Style style) : entries_{{"", std::move(style)}} {}  // NOLINT

  void add(std::string path, AnyStyle style) { entries_.push_back({std::move(path), std::move(style)}); }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// Checks that a style can place `name` of `module`, which is the target or a descendant. Throws StateError if a plain
/// parameter has a gradient. Throws ValueError if it is on another device type, lacks the sharded dim, belongs to a
/// unit, is a DTensor with another mesh or placement, or if another style of the plan requests another placement.
void check_style_parameter(const ParallelStyle& style, const StyleTarget& target, const torch::nn::Module& module,
                           const std::string& name, const Placement& placement);

/// Distributes a parameter or buffer, unless it is undefined or already placed this way. Gradients get `placement`.
void distribute_style_parameter(const ParallelStyle& style, const StyleTarget& target, torch::nn::Module& module,
                                const std::string& name, const Placement& placement);

}  // namespace tessera
