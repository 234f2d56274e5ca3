#include "examples/finetune/finetune_options.h"

#include <CLI/CLI.hpp>
#include <filesystem>

#include "base/error.h"
#include "comm/local_launcher.h"
#include "examples/training/data_path.h"
#include "examples/training/layout_independent_option.h"
#include "examples/training/recompute_option.h"
#include "examples/training/training_log.h"

namespace tessera::examples {

namespace {

constexpr const char* kDescription =
    "Trains a model of Hugging Face further on texts or chats, sharded over several processes, and writes a folder "
    "that\n"
    "transformers opens. Started by torchrun, mpirun or srun it uses their ranks; otherwise it starts --nproc "
    "processes.";

constexpr const char* kExamples =
    "Examples:\n"
    "  ./bazelw run //examples:finetune -- --data README.md --out /tmp/tuned\n"
    "  ./bazelw run //examples:finetune -- --model Llama-3.2-1B --data corpus.jsonl --out tuned --nproc 4 --tp 2 \\\n"
    "      --sequence-length 2048 --save-every 50 --checkpoint-dir run\n"
    "  ./bazelw run //examples:generate -- --model tuned --prompt 'Once upon a time'";

void add_layout(CLI::App& app, FinetuneOptions& options) {
  const char* group = "Layout";
  app.add_option("--nproc", options.nproc, "processes to start")->capture_default_str()->group(group);
  add_restart_options(app, options.restarts, group);
  app.add_option("--tp", options.tp, "ranks that each matrix is sharded over; they see the same data")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--sp", options.sequence_parallel, "with --tp: shard activations along the sequence too")->group(group);
  add_recompute_option(app, "--recompute", options.recompute, group);
  app.add_flag("--bf16", options.bf16, "gather and compute in bfloat16; shards and optimizer stay float32")
      ->group(group);
  app.add_option("--threads", options.threads, "threads of each process")->capture_default_str()->group(group);
}

void add_training(CLI::App& app, FinetuneOptions& options) {
  const char* group = "Training";
  app.add_option("--steps", options.steps, "optimizer steps")->capture_default_str()->group(group);
  app.add_option("--batch", options.batch, "samples per step, over all ranks")->capture_default_str()->group(group);
  app.add_option("--accumulate", options.accumulate,
                 "passes per step, each over a part of the batch: less memory, and gradients are reduced once")
      ->capture_default_str()
      ->group(group);
  add_layout_independent_option(app, options.layout_independent, group);
  app.add_option("--sequence-length", options.sequence_length, "tokens of a sample")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--pad", options.pad, "a document a sample, cut or padded; default: packed one after the other")
      ->group(group);
  app.add_option("--chat-template", options.chat_template, "name of the chats' format; default: the model's own")
      ->group(group);
  app.add_option("--lr", options.lr,
                 "peak learning rate, falls on a cosine to a tenth; default: 2e-5, adapters 2e-4, tiny-llama 3e-3")
      ->check(CLI::PositiveNumber)
      ->group(group);
  app.add_option("--warmup", options.warmup, "steps in which the rate rises")->capture_default_str()->group(group);
  app.add_option("--weight-decay", options.weight_decay, "of matrices")->capture_default_str()->group(group);
  app.add_option("--clip", options.clip, "maximum norm of gradients; 0: any")->capture_default_str()->group(group);
  app.add_option("--seed", options.seed, "of the order of samples")->capture_default_str()->group(group);
}

void add_lora(CLI::App& app, FinetuneOptions& options) {
  const char* group = "LoRA";
  app.add_option("--lora-rank", options.lora_rank, "train adapters of this rank beside frozen weights; 0: the weights")
      ->capture_default_str()
      ->group(group);
  app.add_option("--lora-alpha", options.lora_alpha, "their products are scaled by it, over the rank")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--merge-lora", options.merge_lora, "write the whole model, rather than the adapters for PEFT")
      ->group(group);
}

void check_positive(const char* name, int64_t value) {
  TESSERA_CHECK(ValueError, value >= 1, "{} {}: must be at least 1", name, value);
}

}  // namespace

bool is_tiny_llama(const std::string& model) {
  return std::filesystem::path(model).filename() == "tiny-llama";
}

std::optional<FinetuneOptions> parse_finetune_options(int argc, char** argv, int& exit_code) {
  FinetuneOptions options;
  CLI::App app(kDescription);
  app.footer(kExamples);
  app.add_option("--model", options.model,
                 "folder with config.json, safetensors files and tokenizer.json; default: tiny-llama beside --out, a "
                 "random model over bytes, which is made");
  app.add_option("--data", options.data, "files: .jsonl with \"text\" or \"messages\" in each line, others as text")
      ->required();
  app.add_option("--out", options.out, "new folder for the tuned model, or its adapters")->required();
  add_layout(app, options);
  add_training(app, options);
  add_lora(app, options);
  add_log_options(app, options.metrics, "Metrics");
  add_watch_options(app, options.watch, "Metrics");
  app.add_option("--save-every", options.save_every, "steps between checkpoints; 0: none")
      ->capture_default_str()
      ->group("Checkpoints");
  app.add_option("--checkpoint-dir", options.checkpoint_dir, "folder of checkpoints")->group("Checkpoints");
  app.add_flag("--resume", options.resume, "continue from the latest checkpoint, on any number of ranks")
      ->group("Checkpoints");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : kUserErrorExitCode;
    return std::nullopt;
  }
  options.resume = options.resume || options.restarts.max_restarts > 0;
  options.out = path_from_caller(options.out);
  options.model = options.model.empty() ? (std::filesystem::path(options.out).parent_path() / "tiny-llama").string()
                                        : path_from_caller(options.model);
  if (options.lr == 0) {
    options.lr = is_tiny_llama(options.model) ? 3e-3 : options.lora_rank > 0 ? 2e-4 : 2e-5;
  }
  for (auto& path : options.data) {
    path = path_from_caller(path);
  }
  options.checkpoint_dir = options.checkpoint_dir.empty() ? "" : path_from_caller(options.checkpoint_dir);
  resolve_folder(options.metrics);
  resolve_folders(options.watch);
  return options;
}

void check_finetune_options(const FinetuneOptions& options, int64_t world_size) {
  check_positive("--nproc", options.nproc);
  check_restart_options(options.restarts, options.nproc, {.save_every = options.save_every, .resume = options.resume});
  check_positive("--threads", options.threads);
  check_positive("--steps", options.steps);
  check_positive("--batch", options.batch);
  check_positive("--log-every", options.metrics.every);
  check_watch_options(options.watch, options.steps);
  TESSERA_CHECK(ValueError, options.sequence_length >= 2, "--sequence-length {}: must be at least 2",
                options.sequence_length);
  TESSERA_CHECK(ValueError, options.tp >= 1 && world_size % options.tp == 0,
                "--tp {}: must divide the number of ranks, {}", options.tp, world_size);
  const int64_t dp = world_size / options.tp;
  TESSERA_CHECK(ValueError, options.batch >= dp,
                "--batch {}: must be at least 1 for each of {} ranks that see own data", options.batch, dp);
  check_positive("--accumulate", options.accumulate);
  TESSERA_CHECK(ValueError, options.batch / dp >= options.accumulate,
                "--accumulate {}: must be at most {}, a rank's samples of --batch {} over {} ranks that see own data",
                options.accumulate, options.batch / dp, options.batch, dp);
  check_layout_independent_option(
      options.layout_independent,
      {.batch = options.batch, .accumulate = options.accumulate, .data_ranks = dp, .tp = options.tp});
  TESSERA_CHECK(ValueError, !options.sequence_parallel || options.tp > 1, "--sp: needs --tp 2 or more");
  TESSERA_CHECK(ValueError, options.warmup >= 0 && options.warmup < options.steps,
                "--warmup {}: must be from 0 to --steps - 1, {}", options.warmup, options.steps - 1);
  TESSERA_CHECK(ValueError, options.lora_rank >= 0, "--lora-rank {}: must be at least 0", options.lora_rank);
  TESSERA_CHECK(ValueError, options.lora_rank > 0 || !options.merge_lora, "--merge-lora: needs --lora-rank");
  TESSERA_CHECK(ValueError, options.clip >= 0, "--clip {}: must be at least 0", options.clip);
  TESSERA_CHECK(ValueError, options.weight_decay >= 0, "--weight-decay {}: must be at least 0", options.weight_decay);
  TESSERA_CHECK(ValueError, options.save_every >= 0, "--save-every {}: must be at least 0", options.save_every);
  TESSERA_CHECK(ValueError, options.checkpoint_dir.empty() == (options.save_every == 0 && !options.resume),
                "--checkpoint-dir: goes with --save-every or --resume, and these with it");
  for (const auto& path : options.data) {
    TESSERA_CHECK(ValueError, std::filesystem::exists(path) || std::filesystem::exists(path + ".idx"),
                  "--data {}: does not exist", path);
  }
  TESSERA_CHECK(ValueError, restart_count() > 0 || !std::filesystem::exists(options.out),
                "--out {}: exists; give a new folder", options.out);
}

}  // namespace tessera::examples
