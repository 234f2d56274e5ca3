#include "dtensor/sharding_rule.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "base/error.h"

namespace tessera {

namespace {

// Keyed by "aten::add.Tensor". Written by static initialisers, read-only afterwards.
std::unordered_map<std::string, OpRule>& registry() {
  static auto* rules = new std::unordered_map<std::string, OpRule>();
  return *rules;
}

void register_one(std::string name, const OpRule& rule) {
  TESSERA_ASSERT(rule.strategies != nullptr, "the rule of {} has no strategies", name);
  const bool inserted = registry().emplace(name, rule).second;
  TESSERA_ASSERT(inserted, "{} has two sharding rules", name);
}

}  // namespace

int64_t OpCall::operand_of_arg(size_t arg) const {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].arg == arg) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

void register_op_rule(std::initializer_list<std::string_view> ops, const OpRule& rule) {
  for (const auto op : ops) {
    register_one(std::string(op), rule);
  }
}

void register_op_rule(const std::vector<std::string>& ops, const OpRule& rule) {
  for (const auto& op : ops) {
    register_one(op, rule);
  }
}

void register_whole_ops(const std::vector<std::string>& ops) {
  register_op_rule(ops, {.strategies = [](const OpCall&) { return Strategies(); },
                         .whole_only = [](const OpCall&) { return true; }});
}

const OpRule* find_op_rule(const c10::OperatorName& name) {
  const auto found = registry().find(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  return found == registry().end() ? nullptr : &found->second;
}

std::vector<std::string> ops_with_rules() {
  std::vector<std::string> names;
  for (const auto& [name, rule] : registry()) {
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

LocalCall with_local_sizes(size_t arg) {
  return [arg](const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
    const size_t first = stack->size() - op.schema().arguments().size();
    (*stack)[first + arg] = c10::IValue(plan.outputs[0]->local_sizes());
    op.callBoxed(stack);
  };
}

}  // namespace tessera
