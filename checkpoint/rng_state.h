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
// Keys: "rng.dtensor.cpu" is the generator that DTensors draw from (dtensor/random.h), alike on all ranks whatever
// their number; "rng.plain.cpu.rank2" is libtorch's default generator on rank 2. The same for "cuda" where there is
// one, of the rank's current device.
//
// Thread safety: as at::Generator. Ranks that are threads of one process share libtorch's default generator.

#include <string>

#include "checkpoint/state.h"

namespace tessera::dcp {

/// Copies of the states of the calling rank's generators.
StateDict get_rng_state();

/// Those of the calling rank's generators that the checkpoint has a state for, as tensors for load() to fill: a rank
/// beyond those that saved has none for its default generator, and goes on with what it has. Collective. Throws
/// CheckpointError.
StateDict rng_state_to_load(const std::string& path);

/// Sets the generators that `state` has a key for; other keys are ignored. Throws ValueError, naming the key, for what
/// is not the state of such a generator.
void set_rng_state(const StateDict& state);

}  // namespace tessera::dcp
