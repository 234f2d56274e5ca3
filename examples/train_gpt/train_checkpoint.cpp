#include "examples/train_gpt/train_checkpoint.h"

#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "examples/train_gpt/progress_line.h"

namespace tessera::examples {

namespace {

/// [points, 2]: steps and losses.
at::Tensor as_tensor(const std::vector<LossPoint>& points) {
  auto tensor = at::empty({static_cast<int64_t>(points.size()), 2}, at::kDouble);
  auto* data = tensor.mutable_data_ptr<double>();
  for (const auto& point : points) {
    *data++ = static_cast<double>(point.step);
    *data++ = point.loss;
  }
  return tensor;
}

std::vector<LossPoint> as_points(const at::Tensor& tensor) {
  std::vector<LossPoint> points;
  const auto* data = tensor.const_data_ptr<double>();
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    points.push_back({.step = static_cast<int64_t>(data[2 * i]), .loss = data[2 * i + 1]});
  }
  return points;
}

std::string to_text(const dcp::StateValue& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return fmt::format("{}", *number);
  }
  const auto* real = std::get_if<double>(&value);
  return real ? fmt::format("{}", *real) : std::get<std::string>(value);
}

}  // namespace

TrainCheckpoint::TrainCheckpoint(Trainer& trainer, const TrainOptions& options, const ByteData& data)
    : trainer_(trainer),
      options_(options),
      data_(data),
      checkpointer_(options.checkpoint_dir,
                    {.keep_last = options.keep_last, .memory_folder = memory_folder(options.restarts)}) {}

/// Returns the options that determine each step's samples and how it learns from them.
dcp::StateDict TrainCheckpoint::run_values() const {
  return {{"seed", static_cast<int64_t>(options_.seed)},
          {"data", data_.fingerprint()},
          {"batch", options_.batch},
          {"layout-independent", options_.layout_independent},
          {"context", options_.model.context},
          {"heads", options_.model.heads},
          {"bf16", static_cast<int64_t>(options_.layout.bf16)},
          {"clip", options_.clip},
          {"steps", options_.steps},
          {"lr", options_.lr},
          {"warmup", options_.warmup},
          {"weight-decay", options_.weight_decay}};
}

dcp::State TrainCheckpoint::state(int64_t done) {
  dcp::State state{.model = dcp::get_model_state_dict(trainer_.model()),
                   .optimizer = dcp::get_optimizer_state_dict(trainer_.model(), trainer_.optimizer()),
                   .user = run_values()};
  state.user["step"] = done;
  state.user["train_losses"] = as_tensor(trainer_.history().train);
  state.user["validation_losses"] = as_tensor(trainer_.history().validation);
  return state;
}

void TrainCheckpoint::check_same_run(const std::string& path) const {
  const auto own = run_values();
  // Values that the checkpoint lacks keep those of this run.
  dcp::State saved{.user = own};
  dcp::load(path, saved, {.strict = false});
  for (const auto& [key, value] : own) {
    const auto then = to_text(saved.user.at(key)), now = to_text(value);
    TESSERA_CHECK(ValueError, then == now,
                  "--resume: {} was saved with --{} {}, not {}; use the same value, or another --checkpoint-dir", path,
                  key, then, now);
  }
}

void TrainCheckpoint::resume() {
  if (!options_.resume && options_.save_every == 0) {
    return;
  }
  const auto path = options_.resume ? checkpointer_.latest_valid() : checkpointer_.latest();
  TESSERA_CHECK(ValueError, !path || options_.resume,
                "--save-every: {} has checkpoints of an earlier run; add --resume to go on from them, or give another "
                "--checkpoint-dir",
                options_.checkpoint_dir);
  if (!path) {
    if (restart_count() > 0 && get_rank() == 0) {
      write_out(fmt::format("no checkpoint in {}, training starts anew\n", options_.checkpoint_dir));
    }
    return;
  }
  check_same_run(*path);
  dcp::State state{.model = dcp::get_model_state_dict(trainer_.model()),
                   .optimizer = dcp::optimizer_state_to_load(*path, *trainer_.model(), trainer_.optimizer()),
                   .user = {{"step", int64_t{0}}, {"train_losses", at::Tensor()}, {"validation_losses", at::Tensor()}}};
  dcp::load(*path, state);
  dcp::set_optimizer_state_dict(trainer_.model(), trainer_.optimizer(), state.optimizer);
  const auto step = std::get<int64_t>(state.user.at("step"));
  trainer_.go_on_from(step, {.train = as_points(std::get<at::Tensor>(state.user.at("train_losses"))),
                             .validation = as_points(std::get<at::Tensor>(state.user.at("validation_losses")))});
  if (get_rank() == 0) {
    write_out(fmt::format("resumed from {}, {} steps of {} are done\n", *path, step, options_.steps));
  }
}

void TrainCheckpoint::after_step(int64_t done, bool stops) {
  const auto is_due = [&](int64_t every) { return every > 0 && done % every == 0; };
  const bool saves = options_.save_every > 0 && (is_due(options_.save_every) || done == options_.steps || stops);
  if (saves && options_.async_save) {
    checkpointer_.async_save(done, state(done));
  } else if (saves) {
    checkpointer_.save(done, state(done));
  } else if (is_due(options_.restarts.in_memory_every)) {
    checkpointer_.save_in_memory(done, state(done));
  }
}

}  // namespace tessera::examples
