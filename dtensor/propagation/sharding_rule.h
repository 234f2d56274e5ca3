#pragma once
// Sharding rules: what an op may do with sharded operands, said once per op, for one mesh axis at a time.
//
// A rule lists strategies. A strategy gives the placement that each operand must have along ONE mesh axis
// and the placement that each output then has along it. Axes are independent, so the same list serves a mesh
// of any number of axes; propagate.h picks the cheapest strategy for each. "Everything replicated" is always
// allowed and need not be listed.
//
// Example, mm(a[m, k], b[k, n]):      operands                outputs
//     rows of a                     {Shard(0), Replicate()}  {Shard(0)}
//     columns of b                  {Replicate(), Shard(1)}  {Shard(1)}
//     the contracted dim            {Shard(1), Shard(0)}     {Partial()}
//
// A new family of ops is one file in dtensor/ops that registers its rules from a static object. Rules are
// pure functions of sizes and scalars: same inputs, same strategies, on every rank.
// Source of the idea: torch/distributed/tensor/_ops (single_mesh_dim_strategies), Shardy's factor rules.

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

/// One tensor operand of a call. List arguments are opened: cat({a, b}) has two operands.
struct Operand {
  size_t arg = 0;        // index of the schema argument that holds it
  SpecPtr spec;          // null for a plain tensor of no dims, which counts as replicated
  TensorMeta meta;       // global
  bool written = false;  // the op writes it (in-place, out=): its placements must not change

  int64_t ndim() const { return static_cast<int64_t>(meta.sizes.size()); }
};

/// A call as rules see it. Scalars may be read from `args`; tensors there carry no data.
struct OpCall {
  const c10::OperatorHandle& op;
  at::ArrayRef<c10::IValue> args;
  std::vector<Operand> operands;
  std::vector<TensorMeta> outputs;  // global metas of all defined output tensors, lists opened
  std::vector<int64_t> offsets;     // of outputs that are views: their first element, counted from the viewed tensor's
  size_t axis = 0;                  // the mesh axis under consideration
  int64_t axis_size = 1;            // its number of ranks

  /// The operand held by schema argument `arg`, or -1 (undefined, None, not a tensor). First of a list.
  int64_t operand_of_arg(size_t arg) const;
};

using PlacementVector = c10::SmallVector<Placement, 4>;

struct AxisStrategy {
  PlacementVector operands;
  PlacementVector outputs;
};

using Strategies = std::vector<AxisStrategy>;

struct OpPlan;

/// Runs the op on local tensors: arguments on `stack` (already local) → results on `stack`. Rules whose op
/// must not see the same scalars locally (sizes of a view, the divisor of a mean) supply one. It may rest on the plan's
/// outputs; so where only running the op tells them (OpPlan::outputs_from_results) the op itself runs, unless the rule
/// has a requires_replicated, which expects that.
using CollectiveCall = std::function<void(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan)>;

/// The global metas of an op's outputs, where running the op on meta tensors cannot tell.
using OutputMetas = std::function<std::vector<TensorMeta>(const OpCall&)>;

struct OpRule {
  std::function<Strategies(const OpCall&)> strategies;
  CollectiveCall local_call = nullptr;  // null: the op itself
  OutputMetas output_metas = nullptr;   // null: the op on meta tensors
  /// Where it is true the op runs on whole tensors, on every rank the same, and its results' own metas are
  /// taken: for outputs whose sizes depend on data. Null: never.
  std::function<bool(const OpCall&)> requires_replicated = nullptr;
  /// Whether strategies or output metas depend on the value of a floating scalar. Its type, and whether it is zero,
  /// finite or neither, they may always read. Where they do not, calls that differ only there, such as an optimizer's
  /// steps, share one cached plan.
  bool reads_float_scalars = true;
  /// Whether local_call does more than compute outputs (it draws random numbers, say), so that a rank without any
  /// element of them must call it too.
  bool runs_on_empty_shards = false;
  /// Whether a rank without any element asks the kernel at each call what it throws of dtypes, dims and numbers, as it
  /// does on the others: on operands whose dims are all of size 2, which must fit together. (Without it, ATen's ops are
  /// asked once a plan: OpPlan::must_dry_run.)
  bool needs_dry_run = false;
  /// Whether the op's views are copies of local tensors, of which every rank must know, also one that has nothing.
  bool views_are_copies = false;
  /// Whether results depend on how operands lie, so that moved ones that are whole get the strides that they had.
  bool keeps_strides = false;
  /// With a local_call: whether the op itself takes shards, with the call's other arguments, so that it can be asked.
  bool op_takes_shards = false;
  /// Arguments that the op writes though its schema does not say so.
  std::vector<size_t> undeclared_writes = {};
  /// Whether this call writes argument `arg`, of which the schema or undeclared_writes says so. It may read which
  /// optional arguments are given, and bools, of which plans know, but nothing else. Null: it does.
  bool (*writes)(at::ArrayRef<c10::IValue> args, size_t arg) = nullptr;

  bool also_writes(size_t arg) const {
    return std::find(undeclared_writes.begin(), undeclared_writes.end(), arg) != undeclared_writes.end();
  }
};

/// The propagated call: which specs the operands must have and the outputs get.
struct OpPlan {
  std::vector<SpecPtr> operands;   // null: plain scalar tensor
  std::vector<char> redistribute;  // by operand: its placements differ from the plan's
  std::vector<SpecPtr> outputs;    // empty if outputs_from_results
  std::vector<int64_t> offsets;    // as OpCall's
  const OpRule* rule = nullptr;
  bool outputs_from_results = false;     // each result becomes a replicated DTensor of its own sizes
  bool writes_back = false;              // a written operand is moved: what the op wrote is carried back into it
  bool nothing_to_compute = false;       // this rank's part of every output is empty, so no kernel has to run
  bool operand_strides_changed = false;  // as one moved: results may have to be laid out anew
  /// This rank has no element of an operand, and so its kernel might take what those of other ranks refuse: dtypes,
  /// say, or sizes. Before it first runs, it asks the kernel for what that throws. False once that has thrown nothing;
  /// plans belong to one thread.
  mutable bool must_dry_run = false;
};

/// Registers `rule` of the library for ops such as "aten::add.Tensor". Call from a static initialiser only. A second
/// rule for the same op is an AssertionError. (A program's own ops: dtensor/register_sharding.h.)
void register_op_rule(std::initializer_list<std::string_view> ops, const OpRule& rule);
void register_op_rule(const std::vector<std::string>& ops, const OpRule& rule);

/// For ops that have no strategy but "everything replicated".
const OpRule& whole_op_rule();

/// Registers ops that have no strategy but "everything replicated", such as matrix decompositions.
void register_replicated_ops(const std::vector<std::string>& ops);

/// Throws ValueError where the library has a rule for the op.
void check_replaceable(const std::string& op);

/// Registers a program's own rule, in place of an earlier one of its own. Throws as check_replaceable().
/// Thread safety: may be called at any time; rules that were found before stay valid.
void replace_op_rule(const std::string& op, OpRule rule);

/// Counts calls of replace_op_rule: what was looked up under another count may be out of date.
inline uint64_t op_rules_version() {
  return detail::op_rules_version.load(std::memory_order_acquire);
}

/// Null if the op has none. Stays valid.
const OpRule* find_op_rule(const c10::OperatorName& name);

/// Names of all ops that have a rule, sorted.
std::vector<std::string> ops_with_rules();

/// A CollectiveCall for ops with a sizes argument at index `arg` (view, expand, new_zeros): gives it the local
/// sizes of output 0.
CollectiveCall with_local_sizes(size_t arg);

/// Static object that registers: `static const RegisterOpRules rules([] { register_op_rule(...); });`
struct RegisterOpRules {
  explicit RegisterOpRules(void (*register_rules)()) { register_rules(); }
};

}  // namespace tessera
