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
// run/step-00000100, run/step-00000200, ... are folders as save() makes them. A save that another one of the same
// sizes and cuts preceded costs no planning.
//
// async_save copies what this rank will write to host memory, which it keeps for the next time, and writes it in a
// thread over a process group of its own. There is at most one save in flight: a further call waits for it first. An
// error of it is raised, on every rank, by the next call of save, async_save or wait.
//
// Thread safety: for the thread that trains the rank; the rank's other threads may communicate over other groups.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/progress.h"
#include "checkpoint/state.h"

namespace tessera::dcp {

struct CheckpointerOptions {
  /// When a checkpoint is whole it stays, and of the others the keep_last - 1 of the highest steps; the rest are
  /// removed. So what was just saved is never lost, also where its step is lower than all others'. 0: none is removed.
  int64_t keep_last = 0;
  /// As in SaveOptions. With async_save `progress` is called in the background thread.
  int64_t max_file_bytes = int64_t{5} << 30;
  ProgressFn progress = {};
};

/// Owns the thread that writes. Every rank makes one, with the same arguments, and calls the same functions.
class Checkpointer {
 public:
  explicit Checkpointer(std::string folder, CheckpointerOptions options = {});
  /// Waits; an error becomes a warning.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Returns when the checkpoint is whole. Throws as dcp::save. Collective, as everything below but wait().
  void save(int64_t step, const State& state);
  /// Returns when all ranks have copied their bytes: the tensors may change then. Throws if one cannot, for lack of
  /// memory say; nothing is saved then.
  void async_save(int64_t step, const State& state);
  /// Returns when no save is in flight; throws its error.
  void wait();

  /// Where the checkpoint of `step` is or will be.
  std::string path_of(int64_t step) const;
  /// The whole checkpoint of the highest step, the same answer on all ranks; none if there is none. Throws
  /// CheckpointError where the folder is there and cannot be read.
  std::optional<std::string> latest() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The whole checkpoint of the highest step in `folder`, as Checkpointer names them. Collective.
std::optional<std::string> latest(const std::string& folder);

}  // namespace tessera::dcp
