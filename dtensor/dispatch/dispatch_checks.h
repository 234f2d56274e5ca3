#pragma once
// Checks of dispatch before it runs an op, and their messages.

#include <string>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Lists the operands for messages.
std::string describe_arguments(const CallSignature& call);

/// Rethrows the exception that is being handled. Adds the op, the operands and possible remedies to an error of
/// libtorch, such as a meta kernel's, once if ops call others. A std::exception of a kernel becomes a ValueError with
/// them; errors of this library and std::bad_alloc stay as they are.
[[noreturn]] void rethrow_with_call(const c10::OperatorHandle& op, const CallSignature& call);

/// Throws for a mix of DTensors and plain tensors, which may be replicas or shards. Throws StateError if a parameter of
/// fully_shard is used while sharded, otherwise ValueError.
[[noreturn]] void throw_mixed(const c10::OperatorHandle& op, const CallSignature& call);

/// Returns whether an ImplicitReplication scope may treat the call's plain tensors as replicated. None may be written,
/// and no operand may be a fully_shard parameter that should be gathered.
bool may_replicate_implicitly(const CallSignature& call);

/// Throws NotImplementedError for an op without a rule, unless in a ReplicateAndRun scope.
void check_runs_whole(const c10::OperatorHandle& op, const CallSignature& call);

/// Throws for views that were moved. The viewed tensor would not see a write, and they have not seen its writes.
void check_materialized_views(const c10::OperatorHandle& op, const CallSignature& call);

/// Throws ValueError if the call writes a tensor twice and the plan moves it. Each write would have its own copy.
void check_written_once(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan);

/// Throws in an ExplicitRedistribution scope if the plan moves an operand.
void check_moves_allowed(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan);

/// Throws ValueError: the operands' meshes differ.
[[noreturn]] void throw_different_meshes(const c10::OperatorHandle& op, const CallSignature& call);

}  // namespace tessera
