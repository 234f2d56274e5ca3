#pragma once
// Options for restarting a program's ranks after a failure, and for the state they resume from (docs/reliability.md).

#include <cstdint>
#include <string>

#include "comm/local_launcher.h"

namespace CLI {
class App;
}

namespace tessera::examples {

struct RestartOptions {
  /// As in LaunchOptions.
  int max_restarts = 0;
  int min_ranks = 0;
  bool keep_survivors = false;
  /// Number of steps between in-memory checkpoints, or 0 to make none.
  int64_t in_memory_every = 0;
};

/// Adds --max-restarts, --min-ranks, --keep-survivors and --in-memory-every to a group of a program's options.
void add_restart_options(CLI::App& app, RestartOptions& options, const std::string& group);

/// Values of a program's options --save-every and --resume.
struct CheckpointUse {
  int64_t save_every = 0;
  bool resume = false;
};

/// Throws ValueError, naming the first option that does not fit the others.
void check_restart_options(const RestartOptions& options, int nproc, const CheckpointUse& use);

LaunchOptions launch_options(const RestartOptions& options, int nproc);

/// Returns CheckpointerOptions::memory_folder.
std::string memory_folder(const RestartOptions& options);

}  // namespace tessera::examples
