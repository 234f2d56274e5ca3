// Continues a text with a Hugging Face model: `./bazelw run //examples:generate -- --model DIR --prompt "..."`
// (-- --help for the options). The text appears as it is generated.

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "examples/training/data_path.h"
#include "models/generate.h"
#include "models/pretrained.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

using namespace tessera;

namespace {

struct Options {
  std::string model;
  std::string adapter;
  std::string prompt = "Once upon a time";
  bool chat = false;
  std::string chat_template;
  int nproc = 1;
  int threads = 1;
  std::string dtype = "auto";
  models::GenerateOptions generate;
};

const std::map<std::string, at::ScalarType> kDtypes = {
    {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};

void print(const std::string& text) {
  if (get_rank() == 0) {
    fmt::print("{}", text);
    std::fflush(stdout);
  }
}

std::vector<int32_t> encode_prompt(const Options& options, const Tokenizer& tokenizer) {
  if (!options.chat) {
    return tokenizer.encode(options.prompt);
  }
  const auto chat = options.chat_template.empty() ? ChatTemplate::from_folder(options.model)
                                                  : ChatTemplate::named(options.chat_template);
  return encode_chat(tokenizer, chat.render({{"user", options.prompt}}, {.add_generation_prompt = true})).ids;
}

void run_rank(const Options& options) {
  at::set_num_threads(options.threads);
  init_process_group();
  models::FromPretrainedOptions load{.adapter = options.adapter};
  if (get_world_size() > 1) {
    load.mesh = init_device_mesh(at::kCPU, {get_world_size()}, {"tp"});
  }
  if (options.dtype != "auto") {
    load.dtype = kDtypes.at(options.dtype);
  }
  auto model = models::from_pretrained(options.model, load);
  const auto tokenizer = Tokenizer::from_file(options.model + "/tokenizer.json");

  auto stream = tokenizer.decode_stream();
  auto generate = options.generate;
  generate.on_token = [&](size_t /*text*/, int32_t token) { print(stream.put(token)); };
  if (!options.chat) {
    print(options.prompt);
  }
  models::generate(model, {encode_prompt(options, tokenizer)}, generate);
  print(stream.finish() + "\n");
  destroy_process_group();
}

/// Returns the exit code if there is nothing more to do.
std::optional<int> parse(int argc, char** argv, Options& options) {
  CLI::App app("Continues a text with a model in a folder of Hugging Face, on one process or sharded over several.");
  app.add_option("--model", options.model, "folder with config.json, model.safetensors and tokenizer.json")->required();
  app.add_option("--adapter", options.adapter, "folder of PEFT with adapters of the model");
  app.add_option("--prompt", options.prompt, "the text to continue")->capture_default_str();
  app.add_flag("--chat", options.chat, "answer the prompt, as a chat in the model's own format");
  app.add_option("--chat-template", options.chat_template, "name of another format, such as chatml");
  std::optional<int64_t> max_new_tokens, top_k;
  std::optional<double> temperature, top_p;
  app.add_option("--max-new-tokens", max_new_tokens, "the most tokens to generate");
  app.add_option("--temperature", temperature, "0: always the most likely token; default: generation_config.json's");
  app.add_option("--top-k", top_k, "draw from so many most likely tokens; 0: from all");
  app.add_option("--top-p", top_p, "draw from the fewest tokens with this probability together");
  app.add_option("--seed", options.generate.seed, "of the draws");
  app.add_option("--dtype", options.dtype, "of the parameters; auto: as the folder says")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  app.add_option("--nproc", options.nproc, "processes that the model's matrices are sharded over")
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "threads of each process")->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  options.model = examples::path_from_caller(options.model);
  if (!options.adapter.empty()) {
    options.adapter = examples::path_from_caller(options.adapter);
  }
  const auto seed = options.generate.seed;
  options.generate = models::read_generation_options(options.model);
  options.generate.seed = seed;
  options.generate.max_new_tokens = max_new_tokens.value_or(options.generate.max_new_tokens);
  options.generate.temperature = temperature.value_or(options.generate.temperature);
  options.generate.top_k = top_k.value_or(options.generate.top_k);
  options.generate.top_p = top_p.value_or(options.generate.top_p);
  return std::nullopt;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::optional<int> code;
  const int failed = report_errors([&] { code = parse(argc, argv, options); });
  if (failed != 0 || code) {
    return code.value_or(failed);
  }
  if (options.nproc > 1 && !launched_as_rank()) {
    return launch_local({.nproc = options.nproc});
  }
  return report_errors([&] { run_rank(options); });
}
