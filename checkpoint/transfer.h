#pragma once
// Tensors between state dicts and what they belong to, one at a time; internal to this package.

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/state.h"
#include "checkpoint/rank_sync.h"
#include "checkpoint/state_dict.h"

namespace tessera::dcp {

/// Who sets `given` together: this rank alone where nothing has to be sent, as neither `given` nor `model`, once its
/// units are resharded, has DTensors, and each rank has `given` itself; else all ranks. The same on all ranks, also
/// where one is inside of the model's forward.
RankSync setting_ranks(torch::nn::Module& model, const StateDict& given, const StateDictOptions& options);

/// `own` as `options` want it: itself, whole, on the CPU. Collective where full_state_dict is set.
StateDict exported(StateDict own, const RankSync& ranks, const StateDictOptions& options);

/// What a rank is given, as far as all ranks know it: with broadcast_from_rank0, rank 0's names, sizes and values,
/// where the other ranks' tensors are undefined.
struct Incoming {
  struct Known {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };

  StateDict state;
  /// Of tensors that this rank may not have itself.
  std::map<std::string, Known> known;
};

/// Collective.
Incoming receive(const StateDict& state, const RankSync& ranks, const StateDictOptions& options);

/// Throws ValueError that names `key` unless the tensor of `incoming` fits `target` and both have strided memory,
/// NotImplementedError where `target` is a view that is a copy.
void check_fits(const Incoming& incoming, const std::string& key, const at::Tensor& target,
                const StateDictOptions& options);

/// target = the tensor of this key. Checked before. Collective: with broadcast_from_rank0 always, and where a DTensor
/// meets a plain tensor or other placements.
void copy_in(const Incoming& incoming, const std::string& key, const at::Tensor& target, const RankSync& ranks,
             const StateDictOptions& options);

}  // namespace tessera::dcp
