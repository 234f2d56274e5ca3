#pragma once
// Sharding rules: how an op can run on sharded operands, defined once per op, for one mesh axis at a time.
//
// A rule lists strategies. A strategy gives the placement of each operand and each output along ONE mesh axis. Axes are
// independent, so the same list serves any number of axes; propagate.h chooses the cheapest strategy for each.
// "Everything replicated" is always allowed and need not be listed.
//
// Example, mm(a[m, k], b[k, n]):      operands                outputs
//     rows of a                     {Shard(0), Replicate()}  {Shard(0)}
//     columns of b                  {Replicate(), Shard(1)}  {Shard(1)}
//     the contracted dim            {Shard(1), Shard(0)}     {Partial()}
//
// A family of ops is one file in dtensor/ops that registers its rules from a static object. Rules are pure functions of
// sizes and scalars, so all ranks get the same strategies.
// Source: torch/distributed/tensor/_ops (single_mesh_dim_strategies), Shardy's factor rules.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

namespace detail {
extern std::atomic<uint64_t> op_rules_version;
}

/// Tensor operand of a call. Lists are expanded: cat({a, b}) has two operands.
struct Operand {
  size_t arg = 0;        // index of its schema argument
  SpecPtr spec;          // null for a plain tensor without dims, which counts as replicated
  TensorMeta meta;       // global
  bool written = false;  // written by the op (in-place, out=), so its placements must not change

  int64_t ndim() const { return static_cast<int64_t>(meta.sizes.size()); }
};

/// A call as rules see it. Scalars may be read from `args`; tensors there have no data.
struct OpCall {
  const c10::OperatorHandle& op;
  at::ArrayRef<c10::IValue> args;
  std::vector<Operand> operands;
  std::vector<TensorMeta> outputs;  // global metas of all defined outputs, lists expanded
  std::vector<int64_t> offsets;     // of views: their first element, relative to the viewed tensor's
  size_t axis = 0;                  // the current mesh axis
  int64_t axis_size = 1;            // its number of ranks

  /// Returns the operand of schema argument `arg`, the first of a list, or -1 (undefined, None, not a tensor).
  int64_t operand_of_arg(size_t arg) const;
};

using PlacementVector = c10::SmallVector<Placement, 4>;

struct AxisStrategy {
  PlacementVector operands;
  PlacementVector outputs;
};

using Strategies = std::vector<AxisStrategy>;

struct OpPlan;

/// Runs the op on local tensors: local arguments on `stack` → results on `stack`. For ops whose local call needs other
/// scalars (sizes of a view, the divisor of a mean). It may use the plan's outputs. If only running the op determines
/// these (OpPlan::outputs_from_results), the op itself runs, unless the rule has a requires_replicated, which expects
/// that.
using CollectiveCall = std::function<void(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan)>;

/// Returns the global metas of outputs, if the op on meta tensors does not give them.
using OutputMetas = std::function<std::vector<TensorMeta>(const OpCall&)>;

struct OpRule {
  std::function<Strategies(const OpCall&)> strategies;
  CollectiveCall local_call = nullptr;  // null: the op itself
  OutputMetas output_metas = nullptr;   // null: the op on meta tensors
  /// If true, the op runs on whole tensors, equally on every rank, with its results' own metas. For outputs whose sizes
  /// depend on data. Null: never.
  std::function<bool(const OpCall&)> requires_replicated = nullptr;
  /// False if strategies and output metas do not depend on values of floating scalars. They may always depend on their
  /// type and on whether they are zero, finite or neither. Calls that differ only in values, such as an optimizer's
  /// steps, then share one cached plan.
  bool reads_float_scalars = true;
  /// True if local_call has effects besides computing outputs, such as drawing random numbers, so that all ranks must
  /// call it.
  bool runs_on_empty_shards = false;
  /// True if a rank without elements must ask the kernel in each call for errors of dtypes, dims and numbers. It uses
  /// operands of size 2 in each dim, which must fit together. (Otherwise ATen's ops are asked once per plan:
  /// OpPlan::must_dry_run.)
  bool needs_dry_run = false;
  /// True if the op's views are copies of local tensors, which all ranks must know, even without elements.
  bool views_are_copies = false;
  /// True if results depend on the memory layout of operands, so that moved whole ones keep their strides.
  bool keeps_strides = false;
  /// True if the op itself accepts shards with the call's other arguments, so that it can be asked. For rules with a
  /// local_call.
  bool op_takes_shards = false;
  /// Arguments that the op writes, although its schema does not say so.
  std::vector<size_t> undeclared_writes = {};
  /// Returns whether this call writes argument `arg`, which the schema or undeclared_writes lists. It may depend only
  /// on which optional arguments are given and on bools, which plans know. Null: always.
  bool (*writes)(at::ArrayRef<c10::IValue> args, size_t arg) = nullptr;

  bool also_writes(size_t arg) const {
    return std::find(undeclared_writes.begin(), undeclared_writes.end(), arg) != undeclared_writes.end();
  }
};

/// The propagated call: required specs of operands, and specs of outputs.
struct OpPlan {
  std::vector<SpecPtr> operands;   // null for a plain scalar tensor
  std::vector<char> redistribute;  // by operand: its placements differ from the plan's
  std::vector<SpecPtr> outputs;    // empty if outputs_from_results
  std::vector<int64_t> offsets;    // see OpCall
  const OpRule* rule = nullptr;
  bool outputs_from_results = false;     // results become replicated DTensors with their own sizes
  bool writes_back = false;              // a written operand is moved, so the result is copied back
  bool nothing_to_compute = false;       // this rank's shard of every output is empty, so no kernel runs
  bool operand_strides_changed = false;  // as one is moved, results may need another layout
  /// True if this rank has no element of an operand. Its kernel might then accept dtypes or sizes that other ranks'
  /// reject. Before its first run it asks the kernel, and becomes false if that does not throw. Plans belong to one
  /// thread.
  mutable bool must_dry_run = false;
};

/// Registers a rule of the library for ops such as "aten::add.Tensor", in static initializers. A second rule for an op
/// is an AssertionError. (For a program's own ops, see dtensor/register_sharding.h.)
void register_op_rule(std::initializer_list<std::string_view> ops, const OpRule& rule);
void register_op_rule(const std::vector<std::string>& ops, const OpRule& rule);

/// Returns the rule of ops that support only "everything replicated".
const OpRule& whole_op_rule();

/// Registers ops that support only "everything replicated", such as matrix decompositions.
void register_replicated_ops(const std::vector<std::string>& ops);

/// Throws ValueError if the library has a rule for the op.
void check_replaceable(const std::string& op);

/// Registers or replaces a program's own rule. Throws like check_replaceable(). Thread safety: any time; rules found
/// earlier stay valid.
void replace_op_rule(const std::string& op, OpRule rule);

/// Returns the number of calls of replace_op_rule; lookups under another number may be out of date.
inline uint64_t op_rules_version() {
  return detail::op_rules_version.load(std::memory_order_acquire);
}

/// Returns the rule, which stays valid, or null.
const OpRule* find_op_rule(const c10::OperatorName& name);

/// Returns the sorted names of all ops with a rule.
std::vector<std::string> ops_with_rules();

/// Returns a call for ops with a sizes argument at index `arg` (view, expand, new_zeros), which passes local sizes of
/// output 0.
CollectiveCall with_local_sizes(size_t arg);

/// Static object that registers rules: `static const RegisterOpRules rules([] { register_op_rule(...); });`
struct RegisterOpRules {
  explicit RegisterOpRules(void (*register_rules)()) { register_rules(); }
};

}  // namespace tessera
