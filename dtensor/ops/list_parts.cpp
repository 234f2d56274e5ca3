#include "dtensor/ops/list_parts.h"

#include <algorithm>

#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

/// Groups a call's operands by index: parts[i] has the operands at index i of the lists.
std::vector<std::vector<size_t>> group_operands(const OpCall& call) {
  std::vector<std::vector<size_t>> parts;
  const auto& schema = call.op.schema().arguments();
  size_t place = 0;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const size_t arg = call.operands[i].arg;
    place = i > 0 && call.operands[i - 1].arg == arg ? place + 1 : 0;
    if (schema[arg].type()->kind() != c10::TypeKind::ListType) {
      continue;
    }
    if (parts.size() <= place) {
      parts.resize(place + 1);
    }
    parts[place].push_back(i);
  }
  return parts;
}

AxisStrategy choose_part_strategy(const OpCall& call, const std::vector<size_t>& operands, const TensorMeta& output,
                                  const std::function<Strategies(const OpCall&)>& strategies) {
  OpCall part{.op = call.op, .args = call.args, .operands = {}, .outputs = {output}, .offsets = {}};
  part.axis = call.axis;
  part.axis_size = call.axis_size;
  for (const size_t operand : operands) {
    part.operands.push_back(call.operands[operand]);
  }
  auto choices = strategies(part);
  if (part.operands[0].written) {
    std::erase_if(choices, [](const AxisStrategy& s) { return s.outputs[0] != s.operands[0]; });
  }
  return choose_cheapest(std::move(choices), part);
}

}  // namespace

OpRule rule_by_parts(std::function<Strategies(const OpCall&)> strategies) {
  return {.strategies =
              [strategies = std::move(strategies)](const OpCall& call) {
                AxisStrategy whole{.operands = PlacementVector(call.operands.size(), Replicate()),
                                   .outputs = PlacementVector(call.outputs.size(), Replicate())};
                const auto parts = group_operands(call);
                for (size_t place = 0; place < parts.size(); ++place) {
                  const auto& operands = parts[place];
                  const auto& output = call.outputs.empty() ? call.operands[operands[0]].meta : call.outputs.at(place);
                  const auto part = choose_part_strategy(call, operands, output, strategies);
                  for (size_t i = 0; i < operands.size(); ++i) {
                    whole.operands[operands[i]] = part.operands[i];
                  }
                  if (!call.outputs.empty()) {
                    whole.outputs[place] = part.outputs[0];
                  }
                }
                return Strategies{std::move(whole)};
              },
          .reads_float_scalars = false};
}

std::vector<std::string> ops_beginning_with(std::string_view prefix) {
  std::vector<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string_view overload = name.overload_name;
    const bool is_out = overload.size() >= 3 && overload.substr(overload.size() - 3) == "out";
    if (name.name.rfind(prefix, 0) == 0 && !is_out) {
      names.push_back(overload.empty() ? name.name : name.name + "." + name.overload_name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string_view base_name(std::string_view op, std::string_view prefix) {
  op = op.substr(prefix.size());
  op = op.substr(0, op.find('.'));
  return !op.empty() && op.back() == '_' ? op.substr(0, op.size() - 1) : op;
}

}  // namespace tessera
