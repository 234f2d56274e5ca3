#pragma once
// State of optimizers over models that FullyShardedDataParallel wrapped: saved under the parameters' names, in the form
// that FSDP::set_state_dict_type has set, and loaded into another number of ranks or a model that is not wrapped.
//
//   const auto saved = optim_state_dict(*model, optimizer);            // FULL: full tensors, under plain names
//   ...
//   optim_state_dict_to_load(*model, optimizer, saved, {.load_directly = true});
//
// FULL has full, plain tensors, SHARDED DTensors, each a copy, in the dtype of the shards, since that is what
// optimizers see. A tied parameter has the first of its names. Known optimizers are those of optim/optimizer_fields.h:
// torch::optim's Adam, AdamW, SGD, RMSprop, Adagrad.
//
// Thread safety: one thread a rank. After FullyShardedDataParallel.optim_state_dict, optim_state_dict_to_load and
// rekey_optim_state_dict in torch/distributed/fsdp/fully_sharded_data_parallel.py.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

enum class OptimStateKeyType {
  PARAM_NAME,  // "blocks.0.weight"
  PARAM_ID,    // the place among the optimizer's parameters: 0, 1, ... over all groups
};

struct OptimStateDict {
  using Key = std::variant<std::string, int64_t>;
  struct Group {
    std::vector<Key> params;
    std::map<std::string, double> options;  // "lr", "beta1", ...; a switch is 0 or 1
    bool operator==(const Group&) const = default;
  };
  /// Of a parameter that was stepped: "exp_avg" and the like; "step" is a number without dims.
  std::map<Key, std::map<std::string, at::Tensor>> state;
  std::vector<Group> param_groups;
};

struct OptimStateDictOptions {
  /// What is saved in place of the optimizer's own state: a dict as that optimizer holds it, of either key type, as one
  /// that a program has changed. Null: the optimizer's own. Only read during the call.
  const OptimStateDict* optim_state_dict = nullptr;
  /// Whose first rank keeps the dict where the settings say rank0_only. Null: the ranks of the units' mesh. The ranks
  /// over which entries are gathered are always those of the parameters' meshes.
  const ProcessGroupPtr* group = nullptr;
};

/// The optimizer's state under names. On ranks but the first of the mesh empty if the settings say rank0_only.
/// Collective. Throws NotImplementedError for an unknown optimizer, and LOCAL_STATE_DICT; KeyError for a parameter of
/// the optimizer that the model lacks, or of the given dict that the optimizer lacks; ValueError for a given dict whose
/// groups are others than the optimizer's.
OptimStateDict optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                const OptimStateDictOptions& options = {});

struct OptimStateDictToLoadOptions {
  /// The result is keyed by name in place of id.
  bool is_named_optimizer = false;
  /// Also puts it into the optimizer: state and options of its groups.
  bool load_directly = false;
  /// Whose first rank's dict counts where the settings say rank0_only. Null: the ranks of the units' mesh.
  const ProcessGroupPtr* group = nullptr;
};

/// The dict as the optimizer of this model holds it: entries of sharded parameters as DTensors of this rank's rows. The
/// dict, of either key type, is the same on all ranks; if the settings say rank0_only, that of the first rank counts,
/// in full tensors, of which each rank has one at a time, and the others' may be empty. Unsharded parameters are
/// sharded again. Otherwise no communication, except for DTensors placed differently than the parameter. Throws
/// KeyError for a name that the optimizer lacks, ValueError for groups that differ in number or sizes, StateError
/// inside of a forward or backward.
OptimStateDict optim_state_dict_to_load(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                        const OptimStateDict& dict, OptimStateDictToLoadOptions options = {});

/// The same dict, sharing its tensors, under keys of `key_type`; of names that the optimizer lacks nothing is left. The
/// order of a group's parameters stays. No communication.
/// Throws ValueError for keys of both types, KeyError for an id or a parameter without a name.
OptimStateDict rekey_optim_state_dict(const OptimStateDict& dict, OptimStateKeyType key_type,
                                      const torch::nn::Module& model, const torch::optim::Optimizer& optim);

}  // namespace tessera
