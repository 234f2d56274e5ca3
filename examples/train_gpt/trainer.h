#pragma once
// The training loop: the same code for a sharded model and for a plain one in a single process.
//
//   Trainer trainer(options, data, Layout::sharded(mesh));
//   trainer.run([](const Progress& progress) { fmt::print("{}: {}\n", progress.step, progress.loss); });
//   double loss = trainer.validate();
//
// Every rank of the mesh makes a trainer and calls the same functions in the same order.

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "examples/gpt_model.h"
#include "examples/train_gpt/byte_data.h"
#include "examples/train_gpt/train_options.h"
#include "optim/fused_optimizers.h"

namespace tessera::examples {

/// Where the model lies, and which slices of each global batch this process computes. A global batch is cut into as
/// many slices as there are places on the mesh's data-parallel axes: a sharded rank computes its own, a single process
/// all of them, one after the other. Both add up the slices' gradients in the same order, so that they can be compared
/// bit by bit.
struct Layout {
  /// The ranks that the model lies on, as gpt_layout.h has it; none: a plain model.
  std::optional<DeviceMesh> mesh = std::nullopt;
  int first_slice = 0;
  int own_slices = 1;
  int slices = 1;

  static Layout sharded(const DeviceMesh& mesh);
  /// A single process that computes what `slices` ranks would: with a plain model, or one that is sharded over a mesh
  /// of this rank alone, which casts as the sharded one does.
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

/// What the steps that this process made have taken so far, without validations and checkpoints.
struct TrainingTime {
  int64_t steps = 0;
  double seconds = 0;
};

/// What a progress line shows; the rates are means since the line before, validations not counted.
struct Progress {
  int64_t step = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double ms_per_step = 0;
  /// By this rank.
  double mb_sent_per_step = 0;
  /// Set where a validation was made at this step.
  std::optional<double> validation_loss = std::nullopt;
};

class Trainer {
 public:
  /// `options` and `data` must outlive the trainer.
  Trainer(const TrainOptions& options, const ByteData& data, Layout layout);

  /// Trains for options.steps steps and validates before the first, every options.eval_every and after the last.
  /// `after_step` is called with the number of steps that are done, and ends the run by returning false on every rank.
  void run(const std::function<void(const Progress&)>& on_progress,
           const std::function<bool(int64_t done)>& after_step = {});

  /// run() begins after `done` steps, of which `history` tells.
  void go_on_from(int64_t done, LossHistory history);

  /// One optimizer step. Returns the mean loss of the global batch before it.
  double train_step(int64_t step);

  /// Mean loss of the validation samples, in nats a byte.
  double validate();

  const Layout& layout() const { return layout_; }
  const LossHistory& history() const { return history_; }
  const TrainingTime& training_time() const { return training_time_; }
  Gpt& model() { return model_; }
  optim::FusedAdamW& optimizer() { return optimizer_; }
  /// Scalars in the whole model.
  int64_t parameters() const { return parameter_count(*model_); }

 private:
  optim::FusedAdamW make_optimizer() const;
  void set_learning_rate(int64_t step);
  at::Tensor loss_of(const Batch& batch);
  /// The part of `samples` consecutive ones that belongs to a slice.
  SampleRange slice_range(int slice, int64_t first, int64_t samples) const;
  /// The mean over all slices, from the sum over this process's.
  double mean_over_slices(double own_sum) const;

  const TrainOptions& options_;
  const ByteData& data_;
  Layout layout_;
  Gpt model_;
  optim::FusedAdamW optimizer_;
  LossHistory history_;
  TrainingTime training_time_;
  int64_t first_step_ = 0;
};

/// All parameters by name, whole and plain. Every rank calls it.
std::vector<std::pair<std::string, at::Tensor>> full_parameters(const torch::nn::Module& model);

}  // namespace tessera::examples
