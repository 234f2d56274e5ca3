#include "dtensor/propagation/sharding_rule.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace tessera {

constinit std::atomic<uint64_t> detail::op_rules_version = 0;

namespace {

struct Registry {
  std::mutex mutex;
  // Never freed, because plans of other threads may refer to a rule that a program replaces.
  std::deque<OpRule> rules;
  // Keyed by "aten::add.Tensor".
  std::unordered_map<std::string, const OpRule*> library, own;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

void register_one(std::string name, const OpRule& rule) {
  TESSERA_ASSERT(rule.strategies != nullptr, "the rule of {} has no strategies", name);
  auto& all = registry();
  const bool inserted = all.library.emplace(name, &all.rules.emplace_back(rule)).second;
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

const OpRule& whole_op_rule() {
  static const OpRule rule{
      .strategies = [](const OpCall&) { return Strategies(); },
      .requires_replicated = [](const OpCall&) { return true; },
      .keeps_strides = true};  // _linalg_det factors the row-major matrix, and its gradient refers to that
  return rule;
}

void register_replicated_ops(const std::vector<std::string>& ops) {
  register_op_rule(ops, whole_op_rule());
}

void check_replaceable(const std::string& op) {
  TESSERA_CHECK(ValueError, !registry().library.contains(op),
                "{} has a sharding rule of the library, which cannot be replaced", op);
}

void replace_op_rule(const std::string& op, OpRule rule) {
  check_replaceable(op);
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.own[op] = &all.rules.emplace_back(std::move(rule));
  detail::op_rules_version.fetch_add(1, std::memory_order_release);
}

const OpRule* find_op_rule(const c10::OperatorName& name) {
  const std::string key = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  auto& rules = registry();
  if (const auto found = rules.library.find(key); found != rules.library.end()) {
    return found->second;
  }
  const std::lock_guard lock(rules.mutex);
  const auto found = rules.own.find(key);
  return found == rules.own.end() ? nullptr : found->second;
}

std::vector<std::string> ops_with_rules() {
  auto& rules = registry();
  const std::lock_guard lock(rules.mutex);
  std::vector<std::string> names;
  for (const auto* of : {&rules.library, &rules.own}) {
    for (const auto& [name, rule] : *of) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

CollectiveCall with_local_sizes(size_t arg) {
  return [arg](const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
    const size_t first = stack->size() - op.schema().arguments().size();
    (*stack)[first + arg] = c10::IValue(plan.outputs[0]->local_sizes());
    op.callBoxed(stack);
  };
}

}  // namespace tessera
