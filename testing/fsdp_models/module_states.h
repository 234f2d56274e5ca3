#pragma once
// Compares, copies and sends parameters and buffers across ranks in tests.
//
//   assert_module_states(*model, mesh);                       // equal on all ranks?
//   auto saved = get_state_dict(*model, {});                  // names → tensors; sharded parameters as DTensors
//   zero_model(*model, {.zero_buffers = true});
//   load_state_dict(*model, saved);
//
// Operations on sharded parameters, which are DTensors, act on this rank's rows, so clearing and copying gathers
// nothing.
// Thread safety: one thread per rank. Source: torch/testing/_internal/common_fsdp.py.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

using StateDict = torch::OrderedDict<std::string, at::Tensor>;
using AssertEqual = std::function<void(const at::Tensor& of_rank_0, const at::Tensor& of_other_rank)>;

/// Calls `assert_equal` (default: bit-equality) with rank 0's and each other rank's parameter or buffer, whole and on
/// the CPU. Throws ExpectationError, on every rank, for other numbers, names or shapes. All ranks of a 1-D mesh must
/// call it.
void assert_module_states(const torch::nn::Module& module, const DeviceMesh& mesh,
                          const AssertEqual& assert_equal = {});

struct ZeroModelOptions {
  bool zero_buffers = false;
};
/// Zeros all parameters in place; of sharded ones, this rank's rows.
void zero_model(torch::nn::Module& module, ZeroModelOptions options = {});

struct GetStateDictOptions {
  bool cpu_offload = false;  // to the CPU instead of `device`
  bool half = false;         // floating entries in float16
  at::Device device = at::kCPU;
};
/// Returns parameters, then buffers, by name; tied ones under both names. Entries are the module's own tensors unless
/// converted.
StateDict get_state_dict(const torch::nn::Module& module, GetStateDictOptions options = {});
/// Returns an independent copy of each entry.
StateDict clone_state_dict(const StateDict& state);
/// Copies each entry into the parameter or buffer of its name. Throws KeyError for unknown or missing names.
void load_state_dict(torch::nn::Module& module, const StateDict& state);

/// Returns rank 0's entries on every rank, on `device`; others may pass an empty dict. Throws ValueError, on every
/// rank, for DTensors. All ranks of a 1-D mesh must call it.
StateDict broadcast_state_dict(const StateDict& state, const DeviceMesh& mesh, at::Device device = at::kCPU);

/// Returns copies of the full parameters in the order of parameters(): tied ones are one tensor, plain on the device.
/// Without `recurse`, those of inner units stay shards. All ranks must call it.
std::vector<at::Tensor> get_full_params(torch::nn::Module& module, bool recurse = true);

/// Returns the mapped texts, joined by "_"; nothing is "none". Throws KeyError for an unknown argument.
std::string subtest_name(const std::map<std::string, std::string>& mapping,
                         const std::vector<std::optional<std::string>>& arguments);

/// Calls module.to(device) if requested.
torch::nn::Module& move_to_device(torch::nn::Module& module, bool move, at::Device device = at::kCPU);
/// Makes the module a unit if requested.
torch::nn::Module& maybe_wrap_fsdp(torch::nn::Module& module, bool wrap, const FullyShardOptions& options = {});

}  // namespace tessera::testing
