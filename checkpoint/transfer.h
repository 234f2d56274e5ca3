#pragma once
// Moves tensors between state dicts and the models and optimizers they belong to. Internal to this package.

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/state.h"
#include "checkpoint/ranks/rank_sync.h"
#include "checkpoint/state_dict.h"

namespace tessera::dcp {

/// Returns the ranks that set `given` together. It is only this rank if nothing is a DTensor and rank 0 does not send.
/// Equal on all ranks, even if one is inside the model's forward.
RankSync setting_ranks(torch::nn::Module& model, const StateDict& given, const StateDictOptions& options);

/// Returns `own` as `options` request it. Collective with full_state_dict.
StateDict exported(StateDict own, const RankSync& ranks, const StateDictOptions& options);

/// Returns rank 0's state with tensors on the meta device. Returns none on rank 0 or without broadcast_from_rank0.
/// Collective.
std::optional<StateDict> receive(const StateDict& state, const RankSync& ranks, const StateDictOptions& options);

/// Throws ValueError if `given` has no strided memory; failing among the copies would leave other ranks waiting.
void check_readable(const std::string& key, const at::Tensor& given);

/// Throws ValueError if `given` does not fit `target`, or if `target` has no strided memory. Throws NotImplementedError
/// if `target` is a view that is a copy.
void check_fits(const std::string& key, const at::Tensor& given, const at::Tensor& target,
                const StateDictOptions& options);

struct Transfer {  // copies `given` to `target`
  at::Tensor given;
  at::Tensor target;
};

/// Runs transfers, which must be checked, in one order on all ranks. Collective unless nothing has to be sent.
void transfer(const std::vector<Transfer>& transfers, const RankSync& ranks, const StateDictOptions& options);

}  // namespace tessera::dcp
