#include "fsdp1/first_rank.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/all_gather_strings.h"
#include "comm/collectives.h"
#include "device_mesh/mesh_layout.h"
#include "device_mesh/rank_agreement.h"
#include "dtensor/dtensor.h"
#include "fsdp1/wrapper_state.h"

namespace tessera {

namespace {

using c10::IValue;
using Key = OptimStateDict::Key;

IValue make_ivalue_tuple(std::vector<IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

std::vector<IValue> tuple_elements(const IValue& tuple) {
  return tuple.toTupleRef().elements().vec();
}

IValue packed(const Key& key) {
  return std::visit([](const auto& value) { return IValue(value); }, key);
}

Key unpacked_key(const IValue& value) {
  return value.isString() ? Key(value.toStringRef()) : Key(value.toInt());
}

/// Packs a number with its value, and another tensor with its sizes.
IValue packed(const std::string& field, const at::Tensor& tensor) {
  const auto dtype = static_cast<int64_t>(tensor.scalar_type());
  if (tensor.dim() == 0) {
    return make_ivalue_tuple({field, dtype, tensor.item<double>()});
  }
  std::vector<IValue> sizes(tensor.sizes().begin(), tensor.sizes().end());
  return make_ivalue_tuple({field, dtype, make_ivalue_tuple(std::move(sizes))});
}

at::Tensor unpacked_tensor(const std::vector<IValue>& parts) {
  const auto dtype = static_cast<at::ScalarType>(parts.at(1).toInt());
  if (parts.at(2).isDouble()) {
    return at::scalar_tensor(parts.at(2).toDouble(), dtype);
  }
  std::vector<int64_t> sizes;
  for (const auto& size : tuple_elements(parts.at(2))) {
    sizes.push_back(size.toInt());
  }
  return at::empty(sizes, at::TensorOptions(dtype).device(at::kMeta));
}

std::string packed(const OptimStateDict& dict) {
  std::vector<IValue> states, groups;
  for (const auto& [key, entry] : dict.state) {
    std::vector<IValue> fields{packed(key)};
    for (const auto& [field, tensor] : entry) {
      fields.push_back(packed(field, tensor));
    }
    states.push_back(make_ivalue_tuple(std::move(fields)));
  }
  for (const auto& group : dict.param_groups) {
    std::vector<IValue> params, options;
    for (const auto& key : group.params) {
      params.push_back(packed(key));
    }
    for (const auto& [name, value] : group.options) {
      options.push_back(make_ivalue_tuple({name, value}));
    }
    groups.push_back(make_ivalue_tuple({make_ivalue_tuple(std::move(params)), make_ivalue_tuple(std::move(options))}));
  }
  const auto bytes = torch::jit::pickle(
      make_ivalue_tuple({make_ivalue_tuple(std::move(states)), make_ivalue_tuple(std::move(groups))}));
  return {bytes.begin(), bytes.end()};
}

OptimStateDict unpacked(const std::string& bytes) {
  const auto parts = tuple_elements(torch::jit::unpickle(bytes.data(), bytes.size()));
  OptimStateDict dict;
  for (const auto& state : tuple_elements(parts.at(0))) {
    const auto fields = tuple_elements(state);
    auto& entry = dict.state[unpacked_key(fields.at(0))];
    for (size_t i = 1; i < fields.size(); ++i) {
      const auto field = tuple_elements(fields[i]);
      entry[field.at(0).toStringRef()] = unpacked_tensor(field);
    }
  }
  for (const auto& packed_group : tuple_elements(parts.at(1))) {
    const auto group_parts = tuple_elements(packed_group);
    auto& group = dict.param_groups.emplace_back();
    for (const auto& key : tuple_elements(group_parts.at(0))) {
      group.params.push_back(unpacked_key(key));
    }
    for (const auto& option : tuple_elements(group_parts.at(1))) {
      const auto pair = tuple_elements(option);
      group.options[pair.at(0).toStringRef()] = pair.at(1).toDouble();
    }
  }
  return dict;
}

void check_whole(const OptimStateDict& dict) {
  for (const auto& [key, entry] : dict.state) {
    for (const auto& [field, tensor] : entry) {
      TESSERA_CHECK(ValueError, !is_dtensor(tensor),
                    "optim_state_dict_to_load: '{}' is a DTensor, which the first rank cannot give the others alone; "
                    "pass a dict of full tensors, or load the sharded one on every rank without rank0_only",
                    field);
    }
  }
}

}  // namespace

FirstRank::FirstRank(torch::nn::Module& model, const ProcessGroupPtr* group) : group_(group) {
  const auto units = fsdp_units(model);
  if (!units.empty()) {
    mesh_ = units.front().unit->mesh.root();
    device_ = at::Device(mesh_->device_type());
  } else if (!group && is_initialized()) {
    group_ = &default_group();
  }
  if (group_) {
    is_this_one_ = get_rank(*group_) == 0;
  } else if (mesh_) {
    const auto& ranks = mesh_->ranks();
    place_ = static_cast<size_t>(std::ranges::min_element(ranks) - ranks.begin());
    is_this_one_ = mesh_->local_rank() == static_cast<int64_t>(place_);
  }
}

std::string FirstRank::text_of_first(const std::string& own) const {
  return group_ ? all_gather_strings(*group_, own).at(0) : mesh_ ? all_gather_strings(*mesh_, own).at(place_) : own;
}

// Broadcasts axis by axis, from the first rank's position along each. Data that a rank sends before it has it is sent
// again.
void FirstRank::broadcast_from_first(const at::Tensor& tensor) const {
  if (group_) {
    broadcast(tensor, 0, *group_);
    return;
  }
  if (!mesh_) {
    return;
  }
  const auto coordinate = MeshLayout::row_major(mesh_->shape()).coordinate(static_cast<int64_t>(place_));
  for (int64_t axis = 0; axis < mesh_->ndim(); ++axis) {
    broadcast(tensor, static_cast<int>(coordinate[static_cast<size_t>(axis)]), mesh_->group(axis));
  }
}

OptimStateDict FirstRank::outline(const std::function<OptimStateDict()>& own) const {
  constexpr char kFault = '!', kDict = '=';
  OptimStateDict dict;
  std::string text;
  std::exception_ptr thrown;
  if (is_this_one_) {
    try {
      dict = own();
      check_whole(dict);
      text = kDict + packed(dict);
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      text = kFault + std::string(error.what());
    }
  }
  const auto from_first = text_of_first(text);
  if (thrown) {
    std::rethrow_exception(thrown);
  }
  TESSERA_CHECK(ValueError, from_first.at(0) == kDict, "optim_state_dict_to_load: on the first rank: {}",
                from_first.substr(1));
  return is_this_one_ ? dict : unpacked(from_first.substr(1));
}

at::Tensor FirstRank::value(const at::Tensor& entry) const {
  if (entry.dim() == 0) {
    return entry;
  }
  auto value =
      is_this_one_ ? entry.to(device_).contiguous() : at::empty(entry.sizes(), entry.options().device(device_));
  broadcast_from_first(value);
  return value;
}

}  // namespace tessera
