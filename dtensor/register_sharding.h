#pragma once
// Sharding rules for custom ops, as in torch.distributed.tensor.experimental. See docs/semantics.md.
// Thread safety: any thread may register rules; all ranks register the same ones before the first call.

#include <functional>
#include <string>

#include "dtensor/propagation/sharding_rule.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Registers or replaces the rule of an op such as "robots::smooth.out". Throws ValueError for an unknown op, a
/// built-in rule or a CompositeImplicitAutograd kernel. Calls throw ValueError on every rank if strategies do not fit.
void register_sharding(const std::string& op, std::function<Strategies(const OpCall& call)> strategies);

}  // namespace tessera
