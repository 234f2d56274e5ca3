// What state_cost_test runs under callgrind, for few parameters and for four times as many: each step that goes through
// the state of a model, where ranks send each other what they have on two; and, for larger numbers, each text by
// itself.

#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <memory>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/plan/save_plan.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "optim/fused_optimizers.h"
#include "testing/callgrind.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"

namespace tessera::testing {

namespace {

/// A user's own values, as many as parameters, of which half are this rank's alone.
dcp::StateDict values(int count) {
  dcp::StateDict user;
  for (int i = 0; i < count; i += 2) {
    user["value" + std::to_string(i)] = int64_t{i};
    user[fmt::format("value{} of rank {}", i, get_rank())] = 0.5 * i;
  }
  return user;
}

/// The header, manifest, index and values of a checkpoint, and what ranks tell each other.
void count_texts(int tensors) {
  using namespace dcp;
  std::vector<ShardEntry> entries;
  Manifest manifest;
  std::map<std::string, std::string> weight_map;
  for (int i = 0; i < tensors; ++i) {
    const auto name = "layers." + std::to_string(i) + ".weight";
    const auto slice = ShardSlice::whole({2, 3});
    entries.push_back({.key = name, .sizes = {2, 3}, .slice = slice});
    manifest.files["model.safetensors"].tensors[name] = {{.slice = slice, .hash = 1}};
    manifest.values[Section::Optimizer]["param_groups." + name + ".lr"] = 0.1;
    weight_map[name] = "model.safetensors";
  }
  const auto header = make_save_plan({entries}).files[0].header;
  const auto header_text = format_safetensors_header(header).substr(kLengthBytes);
  const auto manifest_text = format_manifest(manifest), values_text = format_values(manifest.values),
             index_text = format_index(weight_map, 1), entries_text = format_shard_entries(entries);
  const auto count = [&](const std::string& step, const auto& call) {
    count_instructions(step + " " + std::to_string(tensors), 1, call);
  };
  count("format_safetensors_header", [&] { format_safetensors_header(header); });
  count("format_manifest", [&] { format_manifest(manifest); });
  count("format_values", [&] { format_values(manifest.values); });
  count("format_index", [&] { format_index(weight_map, 1); });
  count("format_shard_entries", [&] { format_shard_entries(entries); });
  count("parse_safetensors_header", [&] { parse_safetensors_header(header_text, header.entries.back().end, "f"); });
  count("parse_manifest", [&] { parse_manifest(manifest_text, "f"); });
  count("parse_values", [&] { parse_values(values_text, "f"); });
  count("parse_index", [&] { parse_index(index_text, "f"); });
  count("parse_shard_entries", [&] { parse_shard_entries(entries_text); });
  count("make_save_plan", [&] { make_save_plan({entries, entries}); });
}

struct Trained {
  nn::Sequential net;
  std::unique_ptr<optim::FusedAdamW> optimizer;
};

/// Sharded, after a step.
Trained train(int layers) {
  Trained trained;
  for (int i = 0; i < layers; ++i) {
    trained.net->push_back(nn::Linear(4, 4));
  }
  fully_shard(trained.net);
  trained.optimizer = std::make_unique<optim::FusedAdamW>(trained.net->parameters());
  trained.net->forward(at::ones({2, 4})).sum().backward();
  trained.optimizer->step();
  return trained;
}

/// With a rank alone, what is not about others.
void count_steps(int layers) {
  const TempFolder folder;
  auto [net, optimizer] = train(layers);
  const auto count = [&](const std::string& step, const auto& call) {
    count_instructions(step + " " + std::to_string(2 * layers), 1, call);
  };
  dcp::State all{.model = dcp::get_model_state_dict(net),
                 .optimizer = dcp::get_optimizer_state_dict(net, *optimizer),
                 .user = values(2 * layers)};
  int saves = 0;
  std::string path;
  count("save", [&] { dcp::save(path = folder.path("c" + std::to_string(saves++)), all); });
  {
    dcp::Checkpointer checkpointer(folder.path("run"));
    count("async_save", [&] {
      checkpointer.async_save(saves++, all);
      checkpointer.wait();
    });
  }
  count("optimizer_state_to_load", [&] { all.optimizer = dcp::optimizer_state_to_load(path, net, *optimizer); });
  count("load", [&] { dcp::load(path, all); });
}

/// Gathering, broadcasting and merging what two ranks have.
void count_steps_of_ranks(int layers, const TempFolder& folder) {
  auto [net, optimizer] = train(layers);
  const RankOfCount rank{.is_first = get_rank() == 0, .barrier = [] { barrier(default_group()); }};
  const auto count = [&](const std::string& step, const auto& call) {
    count_instructions(step + " " + std::to_string(2 * layers), rank, call);
  };
  const dcp::StateDictOptions whole{.full_state_dict = true, .cpu_offload = true}, sent{.broadcast_from_rank0 = true};
  dcp::StateDict model, state;
  count("get_model", [&] { model = dcp::get_model_state_dict(net, whole); });
  count("get_optimizer", [&] { state = dcp::get_optimizer_state_dict(net, *optimizer, whole); });
  count("set_model", [&] { dcp::set_model_state_dict(net, model, sent); });
  count("set_optimizer", [&] { dcp::set_optimizer_state_dict(net, *optimizer, state, sent); });
  const dcp::State all{.model = dcp::get_model_state_dict(net), .user = values(2 * layers)};
  int saves = 0;
  count("save_of_ranks", [&] { dcp::save(folder.path(fmt::format("of_ranks{}_{}", layers, saves++)), all); });
}

}  // namespace

}  // namespace tessera::testing

int main() {
  for (const int layers : {15, 60}) {
    tessera::run_ranks(1, [&](int) { tessera::testing::count_steps(layers); });
    const tessera::testing::TempFolder folder;
    tessera::run_ranks(2, [&](int) { tessera::testing::count_steps_of_ranks(layers, folder); });
  }
  for (const int tensors : {200, 800}) {
    tessera::testing::count_texts(tensors);
  }
  return 0;
}
