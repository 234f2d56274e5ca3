#pragma once
// Ops on lists of tensors that do the same to each: foreach and fused optimizer ops. Every tensor has its own
// placements, so a list of differently placed tensors still runs as one local call without communication.
//
//   _foreach_add_({a, b}, {c, d}):   part 0 is the call on (a, c), part 1 that on (b, d)

#include <string_view>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// A rule for such an op: `strategies` is asked for each part, whose operands are the tensors at one place of all
/// lists and whose one output is that of the part (for an in-place op, the tensor at that place of the first list).
/// Operands outside the lists are replicated. Parts of in-place ops keep the written tensor's placement.
OpRule rule_by_parts(std::function<Strategies(const OpCall&)> strategies);

/// Names of all of ATen's ops that begin with `prefix`, but for out= variants.
std::vector<std::string> ops_beginning_with(std::string_view prefix);

/// "aten::_foreach_add_.List" with the prefix "aten::_foreach_" is "add".
std::string_view base_name(std::string_view op, std::string_view prefix);

}  // namespace tessera
