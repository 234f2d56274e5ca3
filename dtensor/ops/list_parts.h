#pragma once
// Ops that do the same to each tensor of lists: foreach and fused optimizer ops. Every tensor has its own placements,
// so a list of differently placed tensors still runs as one local call without communication.
//
//   _foreach_add_({a, b}, {c, d}):   part 0 is the call on (a, c), part 1 the call on (b, d)

#include <string_view>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Returns a rule for such an op. `strategies` is called for each part, whose operands are the tensors at one index of
/// all lists and whose one output is the part's (for an in-place op, the tensor of the first list). Operands outside
/// the lists are replicated. Parts of in-place ops keep the written tensor's placement.
OpRule rule_by_parts(std::function<Strategies(const OpCall&)> strategies);

/// Returns all ATen ops that begin with `prefix`, except out= variants.
std::vector<std::string> ops_beginning_with(std::string_view prefix);

/// Returns the name after the prefix: "add" for "aten::_foreach_add_.List" and "aten::_foreach_".
std::string_view base_name(std::string_view op, std::string_view prefix);

}  // namespace tessera
