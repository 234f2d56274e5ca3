#pragma once
// What a module holds, across ranks: comparing, copying and sending parameters and buffers in tests.
//
//   assert_module_states(*model, mesh);                       // the same on all ranks?
//   auto saved = get_state_dict(*model, {});                  // names → tensors; sharded parameters as DTensors
//   zero_model(*model, {.zero_buffers = true});
//   load_state_dict(*model, saved);
//
// After the free helpers of torch/testing/_internal/common_fsdp.py. Sharded parameters are DTensors, whose operations
// act on this rank's rows, so that nothing has to be gathered to clear or copy them.
//
// Collective where said. Thread safety: one thread a rank.

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

/// Calls `assert_equal` (none: bit-equality) with rank 0's and each other rank's parameter or buffer, all whole and on
/// the CPU. Throws ExpectationError, on every rank, where the ranks have other numbers, names or shapes. Collective
/// over a mesh with one axis.
void assert_module_states(const torch::nn::Module& module, const DeviceMesh& mesh,
                          const AssertEqual& assert_equal = {});

struct ZeroModelOptions {
  bool zero_buffers = false;
};
/// All parameters are 0 in place, this rank's rows of sharded ones.
void zero_model(torch::nn::Module& module, ZeroModelOptions options = {});

struct GetStateDictOptions {
  bool cpu_offload = false;  // to the CPU, in place of `device`
  bool half = false;         // floating entries in float16
  at::Device device = at::kCPU;
};
/// Parameters, then buffers, by name; tied ones under both names. Entries are the module's own tensors where nothing
/// is to be converted. The module stays as it is.
StateDict get_state_dict(const torch::nn::Module& module, GetStateDictOptions options = {});
/// An independent copy, entry by entry.
StateDict clone_state_dict(const StateDict& state);
/// Copies each entry into the parameter or buffer of its name. Throws KeyError for a name that the module lacks, or
/// that is missing.
void load_state_dict(torch::nn::Module& module, const StateDict& state);

/// Rank 0's entries, on every rank, on `device`; the others may pass an empty dict. Plain tensors only: throws
/// ValueError, on every rank, for DTensors. Collective over a mesh with one axis.
StateDict broadcast_state_dict(const StateDict& state, const DeviceMesh& mesh, at::Device device = at::kCPU);

/// Copies of the full parameters, as parameters() lists them: tied ones are one tensor, plain on the device.
/// Without `recurse` those of inner units stay shards. They outlive what training does next. Collective.
std::vector<at::Tensor> get_full_params(torch::nn::Module& module, bool recurse = true);

/// The mapped texts, joined by "_"; nothing is "none". Throws KeyError for an argument that the mapping lacks.
std::string subtest_name(const std::map<std::string, std::string>& mapping,
                         const std::vector<std::optional<std::string>>& arguments);

/// module.to(device), if asked.
torch::nn::Module& move_to_device(torch::nn::Module& module, bool move, at::Device device = at::kCPU);
/// Makes the module a unit, if asked.
torch::nn::Module& maybe_wrap_fsdp(torch::nn::Module& module, bool wrap, const FullyShardOptions& options = {});

}  // namespace tessera::testing
