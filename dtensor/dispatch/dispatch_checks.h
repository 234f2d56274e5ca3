#pragma once
// What dispatch refuses before it runs an op, and how it says so.

#include <c10/util/Exception.h>

#include <string>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// The operands as messages list them.
std::string describe_arguments(const CallSignature& call);

/// To an error of libtorch, of a meta kernel, say, which knows nothing of DTensors: the op, the operands, and what may
/// help. Once, where ops call others.
void add_call_to(c10::Error& error, const c10::OperatorHandle& op, const CallSignature& call);

/// DTensors do not mix with plain tensors: nothing says whether a plain one is a copy or a part. Throws StateError if a
/// parameter of fully_shard is used while sharded, else ValueError.
[[noreturn]] void throw_mixed(const c10::OperatorHandle& op, const CallSignature& call);

/// Whether an ImplicitReplication scope may take the call's plain tensors for copies: none is written, and no operand
/// is a parameter of fully_shard that should have been gathered.
bool may_replicate_plain_tensors(const CallSignature& call);

/// For an op without a rule. Throws NotImplementedError unless a ReplicateAndRun scope lets it run.
void check_runs_whole(const c10::OperatorHandle& op, const CallSignature& call);

/// A view that was moved is a copy: the tensor it should be a view of would not see the write, and it has not seen what
/// was written to that one.
void check_materialized_views(const c10::OperatorHandle& op, const CallSignature& call);

/// Throws ValueError if the call writes a tensor twice and the plan moves it, so that each write is one to its own
/// copy.
void check_written_once(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan);

/// In an ExplicitRedistribution scope: throws if the plan moves an operand.
void check_moves_allowed(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan);

/// Throws ValueError: the operands' meshes differ.
[[noreturn]] void throw_different_meshes(const c10::OperatorHandle& op, const CallSignature& call);

}  // namespace tessera
