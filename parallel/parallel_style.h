#pragma once
// A parallel style: what tensor parallelism does to one module - how its parameters are cut over the ranks of an axis,
// and which placements its inputs and outputs have. Ready ones: linear_styles.h, sequence_parallel.h,
// prepare_module.h. One's own is a class (with style_tensors.h):
//
//   class Halved : public ParallelStyle {                 // an own module type with the parameter "table"
//    public:
//     std::string name() const override { return "Halved"; }
//     void apply(const StyleTarget& target) const override {
//       distribute_style_parameter(*this, target, target.module, "table", Shard(0));
//       auto& point = hook_point(target.module, describe(target));
//       point.register_forward_pre_hook(
//           [mesh = target.mesh, where = describe(target)](HookPoint&, TensorRefs inputs) {
//             *inputs[0] = style_input(*inputs[0], mesh, Replicate(), Replicate(), {.where = where});
//           });
//       point.register_forward_hook([where = describe(target)](HookPoint&, TensorRefs outputs) {
//         *outputs[0] = style_output(*outputs[0], Shard(-1), {.where = where});
//       });
//     }
//   };
//   parallelize_module(model, mesh["tp"], {{"embed", Halved()}, {"layers.*.wq", ColwiseParallel()}});
//
// Ownership: styles are values; a hook captures what it needs of them, never the module (a cycle).
// Thread safety: const functions on values; applying one is for one thread a rank.
// After ParallelStyle in torch/distributed/tensor/parallel/style.py.

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

/// What a style wants of a parameter or buffer.
struct StyleClaim {
  std::string style;  // ParallelStyle::describe
  Placement placement;
};
using StyleClaims = std::map<const c10::TensorImpl*, StyleClaim>;

/// The module that a style is applied to.
struct StyleTarget {
  torch::nn::Module& module;
  /// Its name below the module that parallelize_module was called with: "layers.0.wq", "" for that module itself.
  std::string path;
  /// Of one axis.
  DeviceMesh mesh;
  /// Whose data count where parameters are cut.
  DistributeOptions distribute = {};
  /// Of all styles of a plan, so that two that place one tensor differently are found. check_style_parameter keeps it.
  std::shared_ptr<StyleClaims> claims = nullptr;
};

class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;

  /// As errors show it: "ColwiseParallel".
  virtual std::string name() const = 0;
  /// Throws if the style cannot be applied; changes nothing and does not communicate. parallelize_module checks all
  /// modules of a plan before it applies to any.
  virtual void check(const StyleTarget& target) const;
  /// Distributes the parameters and registers hooks. Collective.
  virtual void apply(const StyleTarget& target) const = 0;

  /// The style and the module: `ColwiseParallel("layers.0.wq")`, `ColwiseParallel(the module itself)`.
  std::string describe(const StyleTarget& target) const;
};

/// Any style as a value: copies share it.
class AnyStyle {
 public:
  template <std::derived_from<ParallelStyle> Style>
  AnyStyle(Style style) : style_(std::make_shared<const Style>(std::move(style))) {}  // NOLINT: a plan holds styles

  const ParallelStyle& operator*() const { return *style_; }
  const ParallelStyle* operator->() const { return style_.get(); }

 private:
  std::shared_ptr<const ParallelStyle> style_;
};

/// Which modules get which style. `path` is a pattern (path_pattern.h) of names below the module that is given to
/// parallelize_module; "" is that module.
class ParallelPlan {
 public:
  struct Entry {
    std::string path;
    AnyStyle style;
  };

  ParallelPlan() = default;
  ParallelPlan(std::initializer_list<Entry> entries) : entries_(entries) {}
  /// One style for the module itself.
  template <std::derived_from<ParallelStyle> Style>
  ParallelPlan(Style style) : entries_{{"", std::move(style)}} {}  // NOLINT

  void add(std::string path, AnyStyle style) { entries_.push_back({std::move(path), std::move(style)}); }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// For ParallelStyle::check: throws ValueError if parameter `name` of `module` (the target or a module below it) is on
/// another type of device than the target's mesh, has no dim that `placement` cuts, belongs to a unit of fully_shard or
/// replicate, is a DTensor that lies otherwise than on that mesh under `placement`, or is to lie otherwise by another
/// style of the plan; and StateError if it is whole and has a gradient. A DTensor that lies so is a tied parameter that
/// another module of the plan brought there.
void check_style_parameter(const ParallelStyle& style, const StyleTarget& target, const torch::nn::Module& module,
                           const std::string& name, const Placement& placement);

/// For ParallelStyle::apply: cuts or copies a parameter or buffer over the target's mesh, unless it is undefined (a
/// Linear without bias) or a DTensor that lies so already. Gradients of a parameter come in the same placement, also of
/// one that is frozen and unfrozen later: a pending sum is reduced when backward reaches it, once a backward.
void distribute_style_parameter(const ParallelStyle& style, const StyleTarget& target, torch::nn::Module& module,
                                const std::string& name, const Placement& placement);

}  // namespace tessera
