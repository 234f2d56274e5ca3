#include "examples/train_gpt/trainer.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numbers>

#include "comm/collectives.h"
#include "comm/comm_stats.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "examples/gpt_layout.h"
#include "examples/training/decayed_adamw.h"
#include "fully_shard/fully_shard.h"

namespace tessera::examples {

namespace {

using Clock = std::chrono::steady_clock;

/// Returns the rate of a linear warm-up, then a cosine from `peak` to a tenth of it.
double learning_rate(int64_t step, double peak, int64_t warmup, int64_t steps) {
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const double progress =
      static_cast<double>(step - warmup) / static_cast<double>(std::max<int64_t>(1, steps - warmup));
  return peak * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * progress)));
}

/// Time and traffic of the steps since the last reading.
class Meter {
 public:
  void add_step(double seconds, int64_t bytes_sent) {
    seconds_ += seconds;
    bytes_sent_ += bytes_sent;
    ++steps_;
  }

  Progress read(int64_t tokens_per_step) {
    const auto steps = static_cast<double>(steps_);
    const Progress progress{.tokens_per_second = steps * static_cast<double>(tokens_per_step) / seconds_,
                            .ms_per_step = 1e3 * seconds_ / steps,
                            .mb_sent_per_step = static_cast<double>(bytes_sent_) / 1e6 / steps};
    *this = Meter();
    return progress;
  }

 private:
  double seconds_ = 0;
  int64_t bytes_sent_ = 0;
  int64_t steps_ = 0;
};

}  // namespace

Layout Layout::sharded(const DeviceMesh& mesh) {
  const int64_t slice = mesh.local_rank("replicate") * mesh.size("dp") + mesh.local_rank("dp");
  return {.mesh = mesh,
          .first_slice = static_cast<int>(slice),
          .slices = static_cast<int>(mesh.size("replicate") * mesh.size("dp"))};
}

Layout Layout::single(int slices, std::optional<DeviceMesh> own_mesh) {
  return {.mesh = std::move(own_mesh), .own_slices = slices, .slices = slices};
}

Trainer::Trainer(const TrainOptions& options, const ByteData& data, Layout layout)
    : options_(options),
      data_(data),
      layout_(std::move(layout)),
      model_(make_model(options.model, options.seed, options.layout)),
      optimizer_(make_decayed_adamw(model_->parameters(), options_.lr, options_.weight_decay)) {
  if (layout_.mesh) {
    lay_out(model_, *layout_.mesh, options_.layout);
  }
  if (options_.layout.meta_init) {
    materialize(model_, options_.seed, options_.layout.device);
  }
  if (options_.layout_independent > 0) {
    gradients_.emplace(model_, LayoutIndependentOptions{.parts = options_.layout_independent});
  }
}

double Trainer::learning_rate_of(int64_t step) const {
  return learning_rate(step, options_.lr, options_.warmup, options_.steps);
}

void Trainer::set_learning_rate(int64_t step) {
  const double lr = learning_rate_of(step);
  for (auto& group : optimizer_.param_groups()) {
    group.options().set_lr(lr);
  }
}

SampleRange Trainer::slice_range(int slice, int64_t first, int64_t samples, int64_t pass) const {
  const int64_t count = samples / (layout_.slices * options_.accumulate);
  return {.first = first + (slice * options_.accumulate + pass) * count, .count = count};
}

double Trainer::mean_over_slices(double own_sum) const {
  const at::Tensor sum = at::scalar_tensor(own_sum, at::kDouble);
  if (layout_.mesh && layout_.own_slices < layout_.slices) {
    all_reduce(sum, ReduceOp::Sum, layout_.mesh->group("dp"));
    all_reduce(sum, ReduceOp::Sum, layout_.mesh->group("replicate"));
  }
  return sum.item<double>() / layout_.slices;
}

at::Tensor Trainer::compute_loss(const Batch& batch) {
  const at::Device device(options_.layout.device);
  return next_byte_loss(model_(batch.tokens.to(device)), batch.targets.to(device));
}

void Trainer::finish_step(int64_t step) {
  if (watch_) {
    watch_->before_optimizer(step + 1);
  }
  set_learning_rate(step);
  clip_and_step();
}

void Trainer::clip_and_step() {
  if (options_.clip > 0) {
    gradient_norm_ =
        gradients_ ? gradients_->clip_grad_norm(options_.clip) : clip_grad_norm_(model_->parameters(), options_.clip);
  }
  optimizer_.step();
}

double Trainer::train_parts(int64_t step) {
  const int64_t count = options_.batch / options_.layout_independent;
  const double loss = gradients_->backward([&](int64_t part) {
    return compute_loss(data_.train_batch(step, {.first = part * count, .count = count}, options_.batch));
  });
  finish_step(step);
  return loss;
}

at::Tensor Trainer::compute_gradients(const std::function<Batch(int slice, int64_t pass)>& batch_of) {
  at::Tensor loss_sum = at::zeros({}, at::dtype(at::kDouble).device(options_.layout.device));
  const int64_t passes = options_.accumulate;
  for (int i = 0; i < layout_.own_slices; ++i) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      if (layout_.mesh) {  // gradients are reduced once
        fsdp(model_).set_requires_gradient_sync(pass + 1 == passes);
        fsdp(model_).set_reshard_after_backward(pass + 1 == passes);
      }
      const at::Tensor loss = compute_loss(batch_of(i, pass)) / passes;
      (loss / layout_.own_slices).backward();
      loss_sum.add_(loss.detach());
    }
  }
  return loss_sum;
}

Batch Trainer::read_batch(int64_t step, int slice, int64_t pass) {
  const auto timed = time_part(log_, StepPart::Data);
  return data_.train_batch(step, slice_range(layout_.first_slice + slice, 0, options_.batch, pass), options_.batch);
}

/// Keeps the batches' tensors, since they are the captured step's input.
at::Tensor Trainer::captured_train_step(int64_t step) {
  const at::Device device(options_.layout.device);
  const auto passes = static_cast<size_t>(options_.accumulate);
  const size_t count = static_cast<size_t>(layout_.own_slices) * passes;
  for (size_t i = 0; i < count; ++i) {
    const Batch batch = read_batch(step, static_cast<int>(i / passes), static_cast<int64_t>(i % passes));
    if (batches_.size() < count) {
      batches_.push_back({batch.tokens.to(device), batch.targets.to(device)});
    }
    batches_[i].tokens.copy_(batch.tokens);
    batches_[i].targets.copy_(batch.targets);
  }
  if (!captured_) {
    captured_ = std::make_unique<CapturedStep>(
        optimizer_,
        [this, passes] {
          optimizer_.zero_grad();
          at::Tensor loss_sum = compute_gradients([&](int slice, int64_t pass) {
            return batches_[static_cast<size_t>(slice) * passes + static_cast<size_t>(pass)];
          });
          clip_and_step();
          return loss_sum;
        },
        CapturedStepOptions{.device = device});
  }
  set_learning_rate(step);
  return (*captured_)();
}

double Trainer::train_step(int64_t step) {
  if (options_.captured) {
    return mean_over_slices(captured_train_step(step).item<double>());
  }
  optimizer_.zero_grad();
  if (gradients_) {
    return train_parts(step);
  }
  const at::Tensor loss_sum = compute_gradients([&](int slice, int64_t pass) { return read_batch(step, slice, pass); });
  finish_step(step);
  // Reading the loss waits for a GPU. It comes last, so that the step's time includes all of its work.
  return mean_over_slices(loss_sum.item<double>());
}

double Trainer::validate_parts() {
  const int64_t count = options_.batch / options_.layout_independent;
  const int64_t batches = options_.eval_samples / options_.batch;
  double loss_sum = 0;
  for (int64_t b = 0; b < batches; ++b) {
    loss_sum += gradients_->evaluate([&](int64_t part) {
      const SampleRange range{.first = b * options_.batch + part * count, .count = count};
      return compute_loss(data_.validation_batch(range, options_.eval_samples));
    });
  }
  return loss_sum / static_cast<double>(batches);
}

double Trainer::validate() {
  if (gradients_) {
    return validate_parts();
  }
  const torch::NoGradGuard no_grad;
  double loss_sum = 0;
  const int64_t batches = options_.eval_samples / options_.batch;
  for (int64_t b = 0; b < batches; ++b) {
    for (int i = 0; i < layout_.own_slices; ++i) {
      for (int64_t pass = 0; pass < options_.accumulate; ++pass) {
        const SampleRange range = slice_range(layout_.first_slice + i, b * options_.batch, options_.batch, pass);
        loss_sum += compute_loss(data_.validation_batch(range, options_.eval_samples)).item<double>();
      }
    }
  }
  return mean_over_slices(loss_sum) / static_cast<double>(batches * options_.accumulate);
}

void Trainer::go_on_from(int64_t done, LossHistory history) {
  first_step_ = done;
  history_ = std::move(history);
}

void Trainer::run(const std::function<void(const Progress&)>& on_progress,
                  const std::function<bool(int64_t done)>& after_step) {
  if (first_step_ == 0) {
    const auto timed = time_part(log_, StepPart::Unmetered);
    history_.validation.push_back({.step = 0, .loss = validate()});
  }
  const int64_t report_every = std::max<int64_t>(1, options_.steps / 100);
  Meter meter;
  for (int64_t step = first_step_; step < options_.steps; ++step) {
    begin_step(step + 1);
    const auto start = Clock::now();
    const int64_t sent_before = comm_stats().bytes_sent();
    history_.train.push_back({.step = step, .loss = train_step(step)});
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    meter.add_step(seconds, comm_stats().bytes_sent() - sent_before);
    training_time_.seconds += seconds;
    ++training_time_.steps;

    const int64_t done = step + 1;
    const bool validates = done % options_.eval_every == 0 || done == options_.steps;
    if (validates) {
      const auto timed = time_part(log_, StepPart::Unmetered);
      history_.validation.push_back({.step = done, .loss = validate()});
    }
    if (log_) {
      log_step(done, validates);
    }
    if (validates || done % report_every == 0) {
      Progress progress = meter.read(options_.batch * options_.model.context);
      progress.step = done;
      progress.loss = history_.train.back().loss;
      if (validates) {
        progress.validation_loss = history_.validation.back().loss;
      }
      on_progress(progress);
    }
    if (after_step) {
      const auto timed = time_part(log_, StepPart::Checkpoint);
      if (!after_step(done)) {
        return;
      }
    }
    end_step(done);
  }
}

void Trainer::begin_step(int64_t step) {
  if (watch_) {
    const auto timed = time_part(log_, StepPart::Unmetered);
    watch_->begin_step(step);
  }
}

void Trainer::end_step(int64_t step) {
  if (watch_) {
    const auto timed = time_part(log_, StepPart::Unmetered);
    watch_->end_step(step);
  }
}

void Trainer::log_step(int64_t done, bool validates) {
  StepResult result{
      .loss = history_.train.back().loss,
      .learning_rate = learning_rate_of(done - 1),
      .gradient_norm = gradient_norm_.defined() ? std::optional(gradient_norm_.item<double>()) : std::nullopt};
  if (validates) {
    result.validation_loss = history_.validation.back().loss;
  }
  log_->after_step(done, result);
}

std::vector<std::pair<std::string, at::Tensor>> full_parameters(const torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& value = item.value();
    parameters.emplace_back(item.key(), (is_dtensor(value) ? full_tensor(value) : value).detach().clone());
  }
  return parameters;
}

}  // namespace tessera::examples
