#pragma once
// Continues training after the loss of another rank, in the same process.
//
//   const Dataset dataset = load();           // stays, like CUDA's context and other data of the process
//   run_elastic([&] {
//     init_process_group();
//     ...                                     // mesh, model, optimizer, Checkpointer: created each time
//     int64_t step = checkpointer.resume_or_start(model, optimizer, user);
//     ...
//     destroy_process_group();
//   });

#include <functional>

namespace tessera {

/// Calls `train`, and calls it again whenever it ends because another rank is lost (CommError, or an error of c10d).
/// Before each repetition, it destroys the rank's default group and state, and waits until the launcher provides the
/// new ranks in the variables that init_process_group() reads. Everything that holds groups must be destroyed when
/// `train` ends, in all of its threads, and `train` must seed random numbers. Other exceptions propagate. Calls `train`
/// only once if the launcher keeps no survivors. docs/reliability.md has more.
/// Thread safety: one thread of a process that is one rank, while no other thread communicates or reads the
/// environment.
void run_elastic(const std::function<void()>& train);

/// Returns whether this rank was started with LaunchOptions::keep_survivors.
bool keeps_survivors();

}  // namespace tessera
