#pragma once
// Tensors between state dicts and what they belong to; internal to this package.

#include <optional>
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

/// With broadcast_from_rank0, on the other ranks: what rank 0 has, whole plain tensors, which are on the meta device
/// here. Else none: this rank has `state` itself. Collective.
std::optional<StateDict> receive(const StateDict& state, const RankSync& ranks, const StateDictOptions& options);

/// Throws ValueError that names `key` unless this rank's own tensor `given` has strided memory to copy from. Else the
/// rank would fail among the copies, where the others wait for it.
void check_readable(const std::string& key, const at::Tensor& given);

/// Throws ValueError that names `key` unless `given` fits `target`, which has strided memory, NotImplementedError where
/// `target` is a view that is a copy.
void check_fits(const std::string& key, const at::Tensor& given, const at::Tensor& target,
                const StateDictOptions& options);

/// `target` is to have what `given` has.
struct Transfer {
  at::Tensor given;
  at::Tensor target;
};

/// Copies all, in this order on all ranks. Checked before. Collective: with broadcast_from_rank0, which sends many in
/// one message, always, and where a DTensor meets a plain tensor or other placements.
void transfer(const std::vector<Transfer>& transfers, const RankSync& ranks, const StateDictOptions& options);

}  // namespace tessera::dcp
