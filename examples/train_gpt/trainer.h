#pragma once
// The training loop, for a sharded model and for a plain one in a single process.
//
//   Trainer trainer(options, data, Layout::sharded(mesh));
//   trainer.run([](const Progress& progress) { fmt::print("{}: {}\n", progress.step, progress.loss); });
//   double loss = trainer.validate();
//
// All ranks of the mesh must make a trainer and the same calls in the same order.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "captured_step/captured_step.h"
#include "device_mesh/device_mesh.h"
#include "examples/gpt_model.h"
#include "examples/train_gpt/byte_data.h"
#include "examples/train_gpt/train_options.h"
#include "examples/training/step_watch.h"
#include "examples/training/training_log.h"
#include "fully_shard/layout_independent.h"
#include "optim/fused_optimizers.h"

namespace tessera::examples {

/// Placement of the model, and this process's slices of each global batch. A global batch has one slice per rank of the
/// mesh's data-parallel axes: a sharded rank computes its own, and a single process computes all of them in sequence.
/// Both add the slices' gradients in the same order, so results can be compared bit by bit.
struct Layout {
  /// Mesh of the model, as in gpt_layout.h, or empty for a plain model.
  std::optional<DeviceMesh> mesh = std::nullopt;
  int first_slice = 0;
  int own_slices = 1;
  int slices = 1;

  static Layout sharded(const DeviceMesh& mesh);
  /// Returns the layout of a single process that repeats the computation of `slices` ranks. Its model is plain, or
  /// sharded over a mesh of this rank alone, which casts like the sharded one.
  static Layout single(int slices, std::optional<DeviceMesh> own_mesh = std::nullopt);
};

struct LossPoint {
  int64_t step = 0;
  double loss = 0;
};

struct LossHistory {
  std::vector<LossPoint> train;
  std::vector<LossPoint> validation;
};

/// Time of this process's steps so far, without validations and checkpoints.
struct TrainingTime {
  int64_t steps = 0;
  double seconds = 0;
};

/// Contents of a progress line; rates are means since the previous line, without validations.
struct Progress {
  int64_t step = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double ms_per_step = 0;
  /// By this rank.
  double mb_sent_per_step = 0;
  /// Set if a validation was made at this step.
  std::optional<double> validation_loss = std::nullopt;
};

class Trainer {
 public:
  /// `options` and `data` must outlive the trainer.
  Trainer(const TrainOptions& options, const ByteData& data, Layout layout);

  /// Trains for options.steps steps, and validates before the first, every options.eval_every and after the last. Calls
  /// `after_step` with the number of completed steps; it ends the run by returning false on every rank.
  void run(const std::function<void(const Progress&)>& on_progress,
           const std::function<bool(int64_t done)>& after_step = {});

  /// Makes run() write metrics.
  void set_log(std::unique_ptr<TrainingLog> log) { log_ = std::move(log); }

  /// Makes run() look at steps as options.watch says.
  void watch() { watch_.emplace(model_, optimizer_, options_.watch); }

  /// Makes run() begin after `done` steps, with their `history`.
  void go_on_from(int64_t done, LossHistory history);

  /// Makes one optimizer step. Returns the mean loss of the global batch before it.
  double train_step(int64_t step);

  /// Returns the mean loss of the validation samples, in nats per byte.
  double validate();

  const Layout& layout() const { return layout_; }
  const LossHistory& history() const { return history_; }
  const TrainingTime& training_time() const { return training_time_; }
  Gpt& model() { return model_; }
  optim::FusedAdamW& optimizer() { return optimizer_; }
  /// Returns the number of scalars in the whole model.
  int64_t parameters() const { return parameter_count(*model_); }

 private:
  double learning_rate_of(int64_t step) const;
  void set_learning_rate(int64_t step);
  void log_step(int64_t done, bool validates);
  void begin_step(int64_t step);
  void end_step(int64_t step);
  at::Tensor compute_loss(const Batch& batch);
  double train_parts(int64_t step);
  /// Sets the learning rate, clips the gradients and steps the optimizer.
  void finish_step(int64_t step);
  void clip_and_step();
  Batch read_batch(int64_t step, int slice, int64_t pass);
  /// Returns the sum of the mean losses of this process's slices.
  at::Tensor compute_gradients(const std::function<Batch(int slice, int64_t pass)>& batch_of);
  at::Tensor captured_train_step(int64_t step);
  double validate_parts();
  /// Returns the samples of pass `pass`, one of options.accumulate, in a slice's part of `samples` consecutive ones.
  SampleRange slice_range(int slice, int64_t first, int64_t samples, int64_t pass) const;
  /// Returns the mean over all slices, from the sum over this process's slices.
  double mean_over_slices(double own_sum) const;

  const TrainOptions& options_;
  const ByteData& data_;
  Layout layout_;
  Gpt model_;
  optim::FusedAdamW optimizer_;
  std::optional<LayoutIndependentGradients> gradients_;  // with options.layout_independent
  LossHistory history_;
  TrainingTime training_time_;
  at::Tensor gradient_norm_;    // of the last step, if it clipped
  std::vector<Batch> batches_;  // one per pass, with options.captured
  std::unique_ptr<CapturedStep> captured_;
  std::unique_ptr<TrainingLog> log_;
  std::optional<StepWatch> watch_;
  int64_t first_step_ = 0;
};

/// Returns all parameters by name, as full, plain tensors. All ranks must call it.
std::vector<std::pair<std::string, at::Tensor>> full_parameters(const torch::nn::Module& model);

}  // namespace tessera::examples
