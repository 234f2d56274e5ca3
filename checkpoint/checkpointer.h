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
// error of it is raised, on every rank, by the next call of save, async_save, latest or wait.
//
// Going back: a run that goes on from an earlier checkpoint than the last one says so.
//
//   dcp::load(checkpointer.path_of(100), state);        // there are 200 and 300 too
//   checkpointer.resume_at(100);
//
// Its first save then sets the checkpoints of later steps aside: they are kept, as step-00000200.aside-0, and a line of
// output names them, but they count no more, for latest() and keep_last, and their steps can be saved anew. Else 200
// and 300 would seem to be ahead of 150, and keep_last would remove 100 before them.
//
// The folder belongs to one run at a time: before a save, what killed saves left in it (step-<n>.incomplete-<m>) is
// removed. Saves of the same run that are in flight stay, also those of another Checkpointer or of dcp::save(); those
// of another run, whose rank 0 is another process, are taken for killed ones.
//
// Thread safety: for the thread that trains the rank; the rank's other threads may communicate over other groups.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/format/progress.h"
#include "checkpoint/format/state.h"

namespace tessera::dcp {

struct CheckpointerOptions {
  /// After a save, the new checkpoint and the keep_last - 1 others with the highest steps are kept. The new one stays
  /// even if its step is lower. 0 keeps all.
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

  /// Returns when the checkpoint is whole. Throws as dcp::save, and ValueError where ranks give different steps, or
  /// negative ones. Collective, as async_save and latest.
  void save(int64_t step, const State& state);
  /// Returns when all ranks have copied their bytes: the tensors may change then. Throws what can be told before files
  /// are written: ranks that disagree, values that are not UTF-8, no memory for the copies. Nothing is saved then.
  void async_save(int64_t step, const State& state);
  /// Returns when no save is in flight; throws its error.
  void wait();

  /// Says that training goes on from the checkpoint of `step`: those of later steps count no more for latest(), and the
  /// next save sets them aside. Throws ValueError where ranks give different steps, or negative ones. Collective.
  void resume_at(int64_t step);

  /// Where the checkpoint of `step` is or will be.
  std::string path_of(int64_t step) const;
  /// The whole checkpoint of the highest step, the same answer on all ranks; none if there is none. Waits for the save
  /// in flight, and throws its error. Throws CheckpointError where the folder, or a checkpoint in it, is there and
  /// cannot be read.
  std::optional<std::string> latest() const;
  /// The same, but verified: all ranks together read every byte of it, once. Where it is damaged, a warning says why
  /// and the one before is taken, and so on; the next save then sets the later ones aside, as after resume_at(). Throws
  /// CheckpointError where there are checkpoints and all of them are damaged.
  std::optional<std::string> latest_valid();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The whole checkpoint of the highest step in `folder`, as Checkpointer names them. Collective. A Checkpointer's save
/// in flight may remove it afterwards, if keep_last is 1: ask that one's latest() instead.
std::optional<std::string> latest(const std::string& folder);

}  // namespace tessera::dcp
