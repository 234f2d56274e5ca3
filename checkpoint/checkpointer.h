#pragma once
// Manages the checkpoints of a run: saves them, optionally in the background or in memory, and keeps the latest ones.
//
//   dcp::Checkpointer checkpointer("run", {.keep_last = 3});      // on every rank, with the same arguments
//   int64_t step = checkpointer.resume_or_start(model, optimizer, user);         // docs/reliability.md
//   checkpointer.async_save(step, dcp::training_state(model, optimizer, user));  // run/step-00000100
//   checkpointer.wait();                                                         // before the program ends
//
// All ranks make the same calls. At most one save is in flight: the next call waits for it, and throws its error. A
// folder belongs to one run at a time. docs/semantics.md shows how to go back to an earlier checkpoint.
// Thread safety: the thread that trains the rank. Other threads may use other process groups meanwhile.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/format/progress.h"
#include "checkpoint/format/state.h"
#include "nn/hooks/module_ref.h"

namespace tessera::dcp {

struct CheckpointerOptions {
  int64_t keep_last = 0;                      // keep the new checkpoint and those of the highest steps; 0 keeps all
  int64_t max_file_bytes = int64_t{5} << 30;  // like SaveOptions
  ProgressFn progress = {};                   // like SaveOptions; async_save() calls it in the background thread
  std::string memory_folder = {};             // of this host, for save_in_memory(): job_memory_folder(), or none
};

class Checkpointer {  // owns the background thread
 public:
  explicit Checkpointer(std::string folder, CheckpointerOptions options = {});
  ~Checkpointer();  // waits for the save in flight and logs its error
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Saves. Collective. Throws like dcp::save(), and ValueError for a step that is negative or differs between ranks.
  void save(int64_t step, const State& state);
  /// Copies this rank's data to host memory, then saves it in the background. Collective. Tensors may change once it
  /// returns. Throws errors that are found before files are written.
  void async_save(int64_t step, const State& state);
  void wait();  // waits for the save in flight and throws its error

  /// Saves an in-memory checkpoint, replacing the previous one once complete. Use it for steps without another save
  /// (docs/reliability.md). With several hosts, the next host keeps a copy. Collective. Does not wait for a save in
  /// flight. Throws like save(), StateError without a memory_folder, CheckpointError if that folder is full, and
  /// NotImplementedError for several hosts without a CPU backend.
  void save_in_memory(int64_t step, const State& state);

  /// Loads the latest_valid() checkpoint into model, optimizer, values of `user`, and saved random generators. Returns
  /// its step, or 0 if there is none. Collective. Throws like latest_valid(), load() and set_optimizer_state_dict().
  int64_t resume_or_start(ModuleRef model, torch::optim::Optimizer& optimizer, StateDict& user);

  void resume_at(int64_t step);  // training continues from this step; collective; throws ValueError like save()

  /// Returns the path of the step's checkpoint, which need not exist. Throws ValueError if `step` is negative.
  std::string checkpoint_path(int64_t step) const;
  /// Returns the path of the complete checkpoint with the highest step, if any. Collective. Throws CheckpointError if
  /// the folder or a checkpoint in it cannot be read.
  std::optional<std::string> latest() const;
  /// Like latest(), but also looks in memory_folder, verifies every byte, and skips damaged checkpoints with a warning.
  /// Throws CheckpointError if all are damaged.
  std::optional<std::string> latest_valid();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the state that resume_or_start() loads, with copies of the states of random generators.
State training_state(ModuleRef model, torch::optim::Optimizer& optimizer, StateDict user = {});

/// Like Checkpointer::latest(), for any folder. With `keep_last = 1`, a save in flight may remove the result.
std::optional<std::string> latest(const std::string& folder);

}  // namespace tessera::dcp
