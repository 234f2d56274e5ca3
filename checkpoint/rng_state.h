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
// Keys: "rng.dtensor.cpu" is the generator that DTensors draw from (dtensor/random/random.h), the same on all ranks of
// a mesh; "rng.dtensor.cpu.rank2" is that of rank 2, and "rng.plain.cpu.rank2" libtorch's default generator there. The
// same for "cuda" where there is one, of the rank's current device.
//
// Where the generators of DTensors were alike on all ranks that saved, any number of ranks resumes with that state.
// Where they were not, as on meshes of some ranks each (pipeline stages) that have drawn differently often, each rank
// resumes with its own: on as many ranks, which make the same meshes.
//
// Thread safety: as at::Generator. RankSync that are threads of one process share libtorch's default generator.

#include <string>

#include "checkpoint/format/state.h"

namespace tessera::dcp {

/// Copies of the states of the calling rank's generators.
StateDict get_rng_state();

/// Those of the calling rank's generators that the checkpoint has a state for, as tensors for load() to fill: a rank
/// beyond those that saved has none for its default generator, and goes on with what it has. Collective. Throws
/// CheckpointError, and ValueError where another number of ranks saved states of DTensors' generators that differ.
StateDict rng_state_to_load(const std::string& path);

/// Sets the generators that `state` has a key for, the rank's own before the common one; other keys are ignored. Throws
/// ValueError, naming the key, for what is not the state of such a generator.
void set_rng_state(const StateDict& state);

}  // namespace tessera::dcp
