#pragma once
// Checkpoints of a training run, and resuming from them.
//
//   TrainCheckpoint checkpoint(trainer, options, data);
//   checkpoint.resume();                                             // with --resume: from the latest complete one
//   trainer.run(on_progress, [&](int64_t done) { return checkpoint.after_step(done, /*stops=*/false), true; });
//   checkpoint.finish();
//
// A run that was killed and resumed on the same number of ranks ends with the same bits as one that was not, since a
// step's samples and learning rate depend only on the seed and the step.

#include <string>

#include "checkpoint/checkpointer.h"
#include "examples/train_gpt/byte_data.h"
#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// `trainer`, `options` and `data` must outlive it. All ranks must make the same calls in the same order.
class TrainCheckpoint {
 public:
  TrainCheckpoint(Trainer& trainer, const TrainOptions& options, const ByteData& data);

  /// Does nothing without --resume or without a checkpoint. Throws ValueError, naming the option, if the checkpoint's
  /// run had other data or learned differently; the bytes of --data count, not its path. Options that an older
  /// checkpoint lacks (--data, --weight-decay) are not compared.
  void resume();
  /// Saves as --save-every and --in-memory-every say, and if the run stops here.
  void after_step(int64_t done, bool stops);
  /// Returns when the last save is complete.
  void finish() { checkpointer_.wait(); }

 private:
  dcp::StateDict run_values() const;
  /// Throws ValueError.
  void check_same_run(const std::string& path) const;
  dcp::State state(int64_t done);

  Trainer& trainer_;
  const TrainOptions& options_;
  const ByteData& data_;
  dcp::Checkpointer checkpointer_;
};

}  // namespace tessera::examples
