#pragma once
// Random generators in a checkpoint, so that a resumed run draws what the whole one would have drawn.
//
//   state.user.merge(dcp::get_rng_state());                       // before save
//
//   auto rng = dcp::rng_state_to_load(path);                      // to resume
//   state.user.insert(rng.begin(), rng.end());                    // handles: load() writes into rng's tensors
//   dcp::load(path, state);
//   dcp::set_rng_state(rng);
//
// Keys: "rng.dtensor.cpu" is the generator that DTensors draw from (dtensor/random/random.h), equal on all ranks of a
// mesh. "rng.dtensor.cpu.rank2" is that of rank 2 where ranks differ, and "rng.plain.cpu.rank2" libtorch's default
// generator there. The same for "cuda", of the rank's current device.
//
// If DTensors' generators were equal on all ranks that saved, any number of ranks may resume. If they were not
// (pipeline stages), the same number of ranks with the same meshes resumes, each with its own.
//
// Thread safety: as at::Generator. Ranks that are threads of one process share libtorch's default generator.

#include <string>

#include "checkpoint/format/state.h"

namespace tessera::dcp {

/// Returns copies of the states of the calling rank's generators.
StateDict get_rng_state();

/// Returns tensors for load() to fill: of the calling rank's generators, those that the checkpoint has. Collective.
/// Throws CheckpointError, and ValueError if another number of ranks saved states that differ between ranks.
StateDict rng_state_to_load(const std::string& path);

/// Sets the generators that `state` has a key for; other keys are ignored.
/// Throws ValueError, naming the key, for what is not the state of such a generator.
void set_rng_state(const StateDict& state);

}  // namespace tessera::dcp
