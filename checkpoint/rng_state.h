#pragma once
// Saves and restores random generators, so that a resumed run draws the numbers that an uninterrupted one would.
//
//   state.user.merge(dcp::get_rng_state());        // before save()
//   auto rng = dcp::rng_state_to_load(path);       // before load(): add these to state.user, too
//   dcp::set_rng_state(rng);                       // after load()
//
// docs/semantics.md lists the keys, and when the number of ranks may change. Thread safety: like at::Generator.

#include <string>

#include "checkpoint/format/state.h"

namespace tessera::dcp {

StateDict get_rng_state();  // copies of the states of this rank's generators

/// Returns tensors for load() to fill, for those of this rank's generators that were saved. Collective. Throws
/// CheckpointError, and ValueError if the saved states differ between ranks and the number of ranks has changed.
StateDict rng_state_to_load(const std::string& path);

void set_rng_state(const StateDict& state);  // ignores other keys; ValueError names the key of an invalid state

}  // namespace tessera::dcp
