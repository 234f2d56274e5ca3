#include "tests/checkpoint/layouts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "testing/temp_folder.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"

namespace tessera::testing {

namespace fs = std::filesystem;

namespace {

TestLayout fsdp_over(int ranks) {
  return {.name = std::to_string(ranks), .ranks = ranks, .shard = [](Tower& tower) { shard_tower(tower); }};
}

c10::DeviceType device_of(const Tower& tower) {
  return tower->parameters().front().device().type();
}

void shard_hsdp(Tower& tower) {
  shard_tower(tower, {.mesh = init_device_mesh(device_of(tower), {2, 2}, {"replicate", "shard"})});
}

void shard_with_tp(Tower& tower, const std::vector<int64_t>& dp, const std::vector<std::string>& names) {
  auto shape = dp;
  shape.push_back(2);
  auto axes = names;
  axes.emplace_back("tp");
  const auto mesh = init_device_mesh(device_of(tower), shape, axes);
  parallelize_tower(tower, mesh["tp"]);
  shard_tower(tower, {.mesh = mesh[names]});
}

}  // namespace

const std::vector<TestLayout>& test_layouts() {
  static const std::vector<TestLayout> layouts = {
      {.name = "1", .ranks = 1, .shard = {}},
      fsdp_over(2),
      fsdp_over(3),
      fsdp_over(4),
      {.name = "2x2 HSDP", .ranks = 4, .shard = shard_hsdp},
      {.name = "2x2 FSDP+TP", .ranks = 4, .shard = [](Tower& tower) { shard_with_tp(tower, {2}, {"dp"}); }},
      {.name = "2x1x2 HSDP+TP",
       .ranks = 4,
       .shard =
           [](Tower& tower) {
             shard_with_tp(tower, {2, 1}, {"replicate", "dp"});
           }},
  };
  return layouts;
}

const TestLayout& test_layout(const std::string& name) {
  const auto& layouts = test_layouts();
  const auto found =
      std::find_if(layouts.begin(), layouts.end(), [&](const auto& layout) { return layout.name == name; });
  TESSERA_CHECK(KeyError, found != layouts.end(), "no layout '{}'", name);
  return *found;
}

// Its eps: gradients of nearly 0, which devices and layouts round apart, are not to count as others do.
TestTrainer::TestTrainer(const TestLayout& layout, uint64_t seed, c10::Device device)
    : device(device),
      model(),
      optimizer(model->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1)) {
  fill_parameters(*model, seed);
  model->to(device);
  if (layout.shard) {
    layout.shard(model);
  }
}

double TestTrainer::train(int64_t step) {
  optimizer.zero_grad();
  const auto loss = weighted_loss(model(make_batch(static_cast<uint64_t>(step), 6, 5).to(device)));
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

dcp::State TestTrainer::state() {
  return {.model = dcp::get_model_state_dict(model), .optimizer = dcp::get_optimizer_state_dict(model, optimizer)};
}

void TestTrainer::save(const std::string& path, int64_t step) {
  auto all = state();
  all.user["step"] = step;
  dcp::save(path, all);
}

int64_t TestTrainer::load(const std::string& path) {
  dcp::State all{.model = dcp::get_model_state_dict(model),
                 .optimizer = dcp::optimizer_state_to_load(path, model, optimizer),
                 .user = {{"step", int64_t{0}}}};
  dcp::load(path, all);
  dcp::set_optimizer_state_dict(model, optimizer, all.optimizer);
  return std::get<int64_t>(all.user.at("step"));
}

dcp::StateDict clones(const dcp::StateDict& state) {
  dcp::StateDict result = state;
  for (auto& [key, value] : result) {
    if (auto* tensor = std::get_if<at::Tensor>(&value)) {
      *tensor = tensor->detach().clone();
    }
  }
  return result;
}

std::map<std::string, std::string> read_files(const std::string& folder, const std::string& suffix) {
  std::map<std::string, std::string> files;
  for (const auto& name : names_in(folder)) {
    if (name.ends_with(suffix)) {
      files[name] = read_file(folder + "/" + name);
    }
  }
  return files;
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera::testing
