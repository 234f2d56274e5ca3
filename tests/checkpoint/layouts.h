#pragma once
// Models that lie on ranks in different ways, trained alike, and the files of their checkpoints.

#include <torch/optim/adamw.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tests/fully_shard/models/small_models.h"

namespace tessera::testing {

/// A tower that is sharded in one of the ways of the resharding matrix.
struct TestLayout {
  std::string name;
  int ranks = 1;
  std::function<void(Tower&)> shard;  // none: plain
};

/// 1 (plain), 2, 3, 4, HSDP 2x2, FSDP 2 x TP 2, replicas 2 x TP 2.
const std::vector<TestLayout>& test_layouts();
const TestLayout& test_layout(const std::string& name);

/// A tower and its AdamW, the same on all ranks.
struct TestTrainer {
  TestTrainer(const TestLayout& layout, uint64_t seed, c10::Device device = c10::kCPU);
  /// One optimizer step on a batch that depends on `step` alone.
  double train(int64_t step);
  dcp::State state();
  /// Loads model, optimizer and step from `path`.
  int64_t load(const std::string& path);
  void save(const std::string& path, int64_t step);

  c10::Device device;
  Tower model;
  torch::optim::AdamW optimizer;
};

inline constexpr dcp::StateDictOptions kFull{.full_state_dict = true};

/// The values, with tensors of their own.
dcp::StateDict clones(const dcp::StateDict& state);

/// Each file of `folder` whose name ends with `suffix`, by name.
std::map<std::string, std::string> read_files(const std::string& folder, const std::string& suffix);
void write_file(const std::string& path, const std::string& content);
std::vector<std::string> names_in(const std::string& folder);

}  // namespace tessera::testing
