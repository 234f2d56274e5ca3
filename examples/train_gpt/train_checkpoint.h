#pragma once
// Checkpoints of a training run: what is in them, and how a run goes on from one.
//
//   TrainCheckpoint checkpoint(trainer, options, data);
//   checkpoint.resume();                                             // with --resume: from the latest, if there is one
//   trainer.run(on_progress, [&](int64_t done) { return checkpoint.after_step(done, /*stops=*/false), true; });
//   checkpoint.finish();
//
// A run that was killed and resumed on as many ranks ends bit by bit as one that was not: a step's samples depend on
// the seed and the step alone, and so does the learning rate.

#include <string>

#include "checkpoint/checkpointer.h"
#include "examples/train_gpt/byte_data.h"
#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// `trainer`, `options` and `data` must outlive it. Every rank calls the same functions in the same order.
class TrainCheckpoint {
 public:
  TrainCheckpoint(Trainer& trainer, const TrainOptions& options, const ByteData& data);

  /// Does nothing without --resume, or if there is no checkpoint yet. Throws ValueError that names the option in which
  /// the checkpoint's run differed where this one would see other data, or learn from them in another way; the bytes of
  /// --data count, not where they lie. What an older checkpoint does not tell (--data, --weight-decay) is not compared.
  void resume();
  /// Saves where --save-every says so, and where the run stops here.
  void after_step(int64_t done, bool stops);
  /// Returns when the last save is whole.
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
