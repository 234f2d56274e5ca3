#pragma once
// The checkpoints of one run: saved every so often, in the background if wanted, the last few of them kept.
//
//   dcp::Checkpointer checkpointer("run", {.keep_last = 3});
//   if (auto path = checkpointer.latest()) { ... dcp::load(*path, state) ... }
//   for (...) {
//     train(step);
//     if (step % 100 == 0) checkpointer.async_save(step, state());     // goes on when the bytes are copied
//   }
//   checkpointer.wait();
//
// run/step-00000100, run/step-00000200, ... are folders as save() makes them. async_save copies what this rank will
// write to host memory and writes it in a thread, over a process group of its own. At most one save is in flight: the
// next call waits for it and throws its error, on every rank.
//
// A run that resumes from an earlier checkpoint than the last one calls resume_at():
//
//   dcp::load(checkpointer.path_of(100), state);        // there are 200 and 300 too
//   checkpointer.resume_at(100);
//
// Its first save renames later checkpoints (step-00000200.aside-0) and prints their names. They are kept, but latest()
// and keep_last ignore them.
//
// The folder belongs to one run at a time: a save removes what killed saves of other processes left in it.
//
// Thread safety: for the thread that trains the rank; its other threads may communicate over other groups.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/format/progress.h"
#include "checkpoint/format/state.h"

namespace tessera::dcp {

struct CheckpointerOptions {
  /// How many checkpoints to keep: the new one and those of the highest steps. 0 keeps all.
  int64_t keep_last = 0;
  /// As in SaveOptions. With async_save `progress` is called in the background thread.
  int64_t max_file_bytes = int64_t{5} << 30;
  ProgressFn progress = {};
};

/// Owns the thread that writes. Every rank makes one with the same arguments and calls the same functions.
class Checkpointer {
 public:
  explicit Checkpointer(std::string folder, CheckpointerOptions options = {});
  /// Waits; an error becomes a warning.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Saves, and returns when the checkpoint is whole. Collective, as async_save and latest.
  /// Throws as dcp::save(), and ValueError for a negative step or one that differs between ranks.
  void save(int64_t step, const State& state);
  /// Saves in the background, and returns when all ranks have copied their bytes, so that the tensors may change.
  /// Throws what is known before files are written; nothing is saved then.
  void async_save(int64_t step, const State& state);
  /// Waits for the save in flight and throws its error.
  void wait();

  /// Declares that training goes on from the checkpoint of `step`. Collective.
  /// Throws ValueError for a negative step or one that differs between ranks.
  void resume_at(int64_t step);

  /// Where the checkpoint of `step` is or will be.
  std::string path_of(int64_t step) const;
  /// Returns the path of the whole checkpoint with the highest step, if any. Waits for the save in flight.
  /// Throws its error, and CheckpointError if the folder or a checkpoint in it cannot be read.
  std::optional<std::string> latest() const;
  /// Returns the same after it has verified every byte. A damaged checkpoint is skipped with a warning, and set aside
  /// by the next save. Throws CheckpointError if all of them are damaged.
  std::optional<std::string> latest_valid();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the path of the whole checkpoint with the highest step in `folder`, if any. Collective.
/// A Checkpointer's save in flight may remove it afterwards, if keep_last is 1.
std::optional<std::string> latest(const std::string& folder);

}  // namespace tessera::dcp
