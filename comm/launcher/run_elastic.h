#pragma once
// Trains on after another rank is lost, in the same process.
//
//   const Dataset dataset = load();           // stays, as do CUDA's context and what the process has loaded
//   run_elastic([&] {
//     init_process_group();
//     ...                                     // mesh, model, optimizer, Checkpointer: made anew each time
//     int64_t step = checkpointer.resume_or_start(model, optimizer, user);
//     ...
//     destroy_process_group();
//   });

#include <functional>

namespace tessera {

/// Calls `train`, and again each time it ends because another rank is lost (CommError, or an error of c10d's), once the
/// launcher has said who the ranks are now, in the variables that init_process_group() reads. In between, the rank's
/// default group and state are destroyed. Everything that holds groups must end with `train`, in all of its threads,
/// and random numbers must be seeded there. Other exceptions pass. Calls it just once where the launcher
/// keeps no survivors. docs/reliability.md has more.
/// Thread safety: of one thread in a process that is one rank, while no other one communicates or reads the
/// environment.
void run_elastic(const std::function<void()>& train);

/// Returns whether this rank was started with LaunchOptions::keep_survivors.
bool keeps_survivors();

}  // namespace tessera
