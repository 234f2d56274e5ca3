// Fine-tunes a Hugging Face model: `./bazelw run //examples:finetune -- --data README.md --out /tmp/tuned`
// (-- --help for the options). run_rank() does the training; the rest prepares and reports.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpointer.h"
#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "comm/run_elastic.h"
#include "comm/shared_gradients.h"
#include "data/token_dataset.h"
#include "dtensor/clip_grad_norm.h"
#include "examples/finetune/finetune_options.h"
#include "examples/finetune/tiny_llama.h"
#include "examples/train_gpt/peak_memory.h"
#include "examples/train_gpt/progress_line.h"
#include "examples/training/data_path.h"
#include "examples/training/decayed_adamw.h"
#include "examples/training/training_log.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/layout_independent.h"
#include "lora/lora.h"
#include "models/adapter.h"
#include "models/generate.h"
#include "models/pretrained.h"
#include "optim/fused_optimizers.h"
#include "optim/lr_schedule.h"

namespace tessera::examples {
namespace {

template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  if (get_rank() == 0) {
    write_out(fmt::format(format, std::forward<Args>(args)...) + "\n");
  }
}

models::Decoder load_model(const FinetuneOptions& options, const DeviceMesh& mesh) {
  models::DecoderLayout layout;
  layout.sequence_parallel = options.sequence_parallel;
  layout.recompute = options.recompute;
  if (options.bf16) {
    layout.precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  }
  models::FromPretrainedOptions load{.mesh = mesh, .layout = layout, .dtype = at::kFloat};
  if (options.lora_rank > 0) {
    load.lora = LoraConfig{.target_modules = {"*_proj"}, .r = options.lora_rank, .lora_alpha = options.lora_alpha};
  }
  return models::from_pretrained(options.model, load);
}

/// Returns whether the lines of a file are chats, according to the first one.
bool has_chats(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line.find("\"messages\"") != std::string::npos;
}

data::DataSource open_source(const FinetuneOptions& options, const std::string& path) {
  if (std::filesystem::exists(path + ".idx")) {
    return {.source = data::TokenFile{path}};
  }
  if (!path.ends_with(".jsonl")) {
    return {.source = data::TextFiles{{path}}};
  }
  if (!has_chats(path)) {
    return {.source = data::JsonLines{{path}}};
  }
  const auto chat_template = options.chat_template.empty() ? ChatTemplate::from_folder(options.model)
                                                           : ChatTemplate::named(options.chat_template);
  return {.source = data::Chats{{path}, chat_template}};
}

data::TokenDataset open_data(const FinetuneOptions& options, const models::DecoderConfig& config,
                             const DeviceMesh& mesh) {
  data::TokenDatasetOptions data{.tokenizer = Tokenizer::from_file(options.model + "/tokenizer.json"),
                                 .vocab_size = config.vocab_size,
                                 .sequence_length = options.sequence_length,
                                 .fill = options.pad ? data::Fill::Pad : data::Fill::Pack,
                                 .long_documents = data::LongDocuments::Cut,
                                 .seed = options.seed,
                                 .threads = options.threads,
                                 .mesh = mesh};
  for (const auto& path : options.data) {
    data.sources.push_back(open_source(options, path));
  }
  const auto stop_tokens = models::read_generation_options(options.model).stop_tokens;
  if (!stop_tokens.empty()) {
    data.eos_id = stop_tokens.front();
  }
  return data::TokenDataset(data);
}

/// Splits a tensor, which may be undefined, by rows into parts.
std::vector<at::Tensor> split_rows(const at::Tensor& tensor, int64_t parts) {
  return tensor.defined() ? tensor.tensor_split(parts) : std::vector<at::Tensor>(static_cast<size_t>(parts));
}

/// Splits a batch by rows into parts.
std::vector<data::Batch> split_batch(const data::Batch& batch, int64_t parts) {
  const auto ids = split_rows(batch.ids, parts), labels = split_rows(batch.labels, parts),
             segment_ids = split_rows(batch.segment_ids, parts);
  std::vector<data::Batch> result(ids.size());
  for (size_t part = 0; part < ids.size(); ++part) {
    result[part].ids = ids[part];
    result[part].labels = labels[part];
    result[part].segment_ids = segment_ids[part];
  }
  return result;
}

/// Returns the number of tokens of a batch that count for the loss.
at::Tensor count_labels(const data::Batch& batch) {
  return (batch.labels.narrow(1, 1, batch.labels.size(1) - 1) != -100).sum().to(at::kDouble);
}

/// Returns the sum of a batch's losses over `label_count`, plus the auxiliary loss of a model with a router.
at::Tensor loss_of(models::Decoder& model, const data::Batch& batch, double label_count, double router_weight) {
  const auto loss =
      model->forward(batch.ids, {.segment_ids = batch.segment_ids, .labels = batch.labels, .label_count = label_count});
  const bool has_router_loss = model->config.moe && model->config.moe->output_router_logits;
  return has_router_loss ? loss + models::router_aux_loss(model) * router_weight : loss;
}

/// Computes the gradients of one global batch in `passes`, where `batch` is this rank's part. Returns the batch's mean
/// loss per token that counts.
double train_step(models::Decoder& model, const data::Batch& batch, const DeviceMesh& dp, int64_t passes) {
  const auto count = count_labels(batch);
  all_reduce(count, ReduceOp::Sum, dp.group("dp"));
  const double tokens = std::max(count.item<double>(), 1.0);
  const auto parts = split_batch(batch, passes);
  const auto mean = at::zeros({}, at::kDouble);
  for (size_t pass = 0; pass < parts.size(); ++pass) {
    const bool is_last = pass + 1 == parts.size();
    fsdp(model).set_requires_gradient_sync(is_last);  // one gather per pass, one reduction
    fsdp(model).set_reshard_after_backward(is_last);
    // Gradients are averaged over the ranks of dp, so this scale yields their sum over all tokens.
    const auto loss =
        loss_of(model, parts[pass], tokens / static_cast<double>(dp.size()), 1 / static_cast<double>(passes));
    loss.backward();
    mean.add_(loss.detach());
  }
  all_reduce(mean, ReduceOp::Avg, dp.group("dp"));
  return mean.item<double>();
}

/// Does the same for a whole global batch, equal on all ranks.
double train_parts(models::Decoder& model, const data::Batch& batch, LayoutIndependentGradients& gradients,
                   int64_t count) {
  const auto parts = split_batch(batch, count);
  const double tokens = std::max(count_labels(batch).item<double>(), 1.0);
  return gradients.backward([&](int64_t part) {
    return loss_of(model, parts[static_cast<size_t>(part)], tokens / static_cast<double>(count), 1);
  });
}

/// Null without --log-dir and --metrics-port.
std::unique_ptr<TrainingLog> open_log(const FinetuneOptions& options, const DeviceMesh& mesh) {
  if (options.metrics.is_none()) {
    return nullptr;
  }
  return std::make_unique<TrainingLog>(
      TrainingLogOptions{.target = options.metrics,
                         .mesh = mesh,
                         .tokens_per_step = options.batch * options.sequence_length,
                         .peak_memory_bytes = [] { return peak_memory_bytes(at::kCPU); }});
}

/// Returns the number of finished steps.
int64_t resume(const FinetuneOptions& options, dcp::Checkpointer& checkpointer, models::Decoder& model,
               optim::FusedAdamW& optimizer, data::TokenDataset& dataset) {
  dcp::StateDict position = dataset.state_dict();
  const int64_t step = checkpointer.resume_or_start(model, optimizer, position);
  if (step == 0) {
    print("no checkpoint in {}: training starts", options.checkpoint_dir);
    return 0;
  }
  dataset.load_state_dict(position);
  print("resumed: {} steps are done, the next sample is {}", step, dataset.next_sample());
  return step;
}

/// Saves to disk or to memory, if a checkpoint is due after `done` steps.
void save_checkpoints(const FinetuneOptions& options, int64_t done, dcp::Checkpointer& checkpointer,
                      const std::function<dcp::State()>& state) {
  const auto is_due = [&](int64_t every) { return every > 0 && done % every == 0; };
  if (is_due(options.save_every)) {
    checkpointer.async_save(done, state());
  } else if (is_due(options.restarts.in_memory_every)) {
    checkpointer.save_in_memory(done, state());
  }
}

/// Saves under another name first, so that a run killed meanwhile leaves nothing that looks complete.
void save_result(const FinetuneOptions& options, models::Decoder& model) {
  const std::string unfinished = options.out + ".incomplete";
  if (get_rank() == 0) {
    std::filesystem::remove_all(unfinished);
  }
  barrier(default_group());
  if (options.lora_rank > 0 && !options.merge_lora) {
    models::save_adapter(model, unfinished);
  } else {
    if (options.merge_lora) {
      merge_lora(model);
    }
    models::save_pretrained(model, unfinished);
  }
  // An earlier start that ended after this line has left the same result.
  if (get_rank() == 0 && !std::filesystem::exists(options.out)) {
    std::filesystem::rename(unfinished, options.out);
  }
  barrier(default_group());
}

void run_rank(const FinetuneOptions& options) {
  at::set_num_threads(options.threads);
  enable_shared_gradients();
  init_process_group();
  check_finetune_options(options, get_world_size());
  const auto mesh = init_device_mesh(at::kCPU, {get_world_size() / options.tp, options.tp}, {"dp", "tp"});
  const auto dp = mesh["dp"];

  auto model = load_model(options, mesh);
  auto dataset = open_data(options, model->config, mesh);
  auto optimizer = make_decayed_adamw(model->parameters(), options.lr, options.weight_decay);
  const auto schedule =
      optim::cosine_schedule({.warmup_steps = options.warmup, .total_steps = options.steps, .min_ratio = 0.1});
  const auto base_lrs = optim::get_lrs(optimizer);
  print("{} on {} ranks ({} for data, {} for matrices); {} tokens, {} samples an epoch", options.model,
        get_world_size(), dp.size(), options.tp, dataset.num_tokens(), dataset.samples_per_epoch());

  if (const auto links = links_line(options.watch, at::kCPU); !links.empty()) {
    print("{}", links);
  }

  std::optional<dcp::Checkpointer> checkpointer;
  int64_t done = 0;
  if (!options.checkpoint_dir.empty()) {
    checkpointer.emplace(options.checkpoint_dir,
                         dcp::CheckpointerOptions{.keep_last = 2, .memory_folder = memory_folder(options.restarts)});
    done = options.resume ? resume(options, *checkpointer, model, optimizer, dataset) : 0;
  }

  std::optional<LayoutIndependentGradients> gradients;
  if (options.layout_independent > 0) {
    gradients.emplace(model, LayoutIndependentOptions{.parts = options.layout_independent});
  }
  const data::RankPart own_part{.rank = dp.local_rank("dp"), .ranks = dp.size()};
  const auto log = open_log(options, mesh);
  StepWatch watch(model, optimizer, options.watch);
  const int64_t print_every = std::max<int64_t>(1, options.steps / 20);
  auto last_print = std::chrono::steady_clock::now();
  for (int64_t step = done; step < options.steps; ++step) {
    watch.begin_step(step + 1);
    optimizer.zero_grad();
    const auto batch = [&] {
      const auto timed = time_part(log, StepPart::Data);
      return dataset.next_batch(options.batch, gradients ? data::RankPart() : own_part);
    }();
    const double loss = gradients ? train_parts(model, batch, *gradients, options.layout_independent)
                                  : train_step(model, batch, dp, options.accumulate);
    watch.before_optimizer(step + 1);
    const double norm = options.clip == 0 ? 0
                        : gradients       ? gradients->clip_grad_norm(options.clip).item<double>()
                                          : clip_grad_norm_(model->parameters(), options.clip).item<double>();
    optim::set_lrs(optimizer, base_lrs, schedule(step + 1));
    optimizer.step();
    if (log) {
      log->after_step(step + 1, {.loss = loss,
                                 .learning_rate = options.lr * schedule(step + 1),
                                 .gradient_norm = options.clip > 0 ? std::optional(norm) : std::nullopt});
    }
    if ((step + 1) % print_every == 0 || step + 1 == options.steps) {
      const auto now = std::chrono::steady_clock::now();
      const int64_t steps = std::min(print_every, step + 1 - done);
      print("step {}/{}  loss {:.4f}  norm {:.2f}  {:.0f} tokens/s", step + 1, options.steps, loss, norm,
            static_cast<double>(steps * options.batch * options.sequence_length) /
                std::chrono::duration<double>(now - last_print).count());
      last_print = now;
    }
    if (checkpointer) {
      const auto timed = time_part(log, StepPart::Checkpoint);
      save_checkpoints(options, step + 1, *checkpointer,
                       [&] { return dcp::training_state(model, optimizer, dataset.state_dict()); });
    }
    watch.end_step(step + 1);
  }
  if (checkpointer) {
    checkpointer->wait();
  }
  save_result(options, model);
  print("saved {}", options.out);
  destroy_process_group();
}

/// Makes the folder of the tiny model if the user asks for it.
void prepare_model(const std::string& folder) {
  if (std::filesystem::exists(folder + "/config.json")) {
    return;
  }
  TESSERA_CHECK(ValueError, is_tiny_llama(folder) && !std::filesystem::exists(folder),
                "--model {}: has no config.json; give a folder of Hugging Face, or a new tiny-llama", folder);
  at::set_num_threads(1);
  write_tiny_llama(folder);
  write_out(fmt::format("made {}, a random model over bytes\n", folder));
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  using namespace tessera;
  std::optional<examples::FinetuneOptions> options;
  int exit_code = 0;
  const int failed = report_errors([&] {
    options = examples::parse_finetune_options(argc, argv, exit_code);
    if (options && !launched_as_rank()) {
      check_finetune_options(*options, options->nproc);
      examples::check_target(options->metrics);
      examples::check_folders(options->watch);
      examples::prepare_model(options->model);
    }
  });
  if (failed != 0 || !options) {
    return failed != 0 ? failed : exit_code;
  }
  if ((options->nproc > 1 || options->restarts.max_restarts > 0) && !launched_as_rank()) {
    return launch_local(launch_options(options->restarts, options->nproc));
  }
  return report_errors([&] { run_elastic([&] { examples::run_rank(*options); }); });
}
