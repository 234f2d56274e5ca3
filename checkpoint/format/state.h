#pragma once
// State to save or load: tensors and values by name, in three sections.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <variant>

namespace tessera::dcp {

using StateValue = std::variant<at::Tensor, int64_t, double, std::string>;  // tensors may be DTensors

/// Handles to tensors, not copies: load() writes into them. Sorted, so that all ranks use the same order.
using StateDict = std::map<std::string, StateValue>;

/// Data to save or load. Tensors that differ between ranks are saved from the first one (docs/semantics.md). Use one
/// key per rank to keep all: fmt::format("rng.{}", rank).
struct State {
  StateDict model = {};
  StateDict optimizer = {};
  StateDict user = {};  // anything else; docs/semantics.md covers learning-rate schedules
};

}  // namespace tessera::dcp
