#include "debug/memory_timeline.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "debug/memory_files.h"
#include "debug/trace.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "nn/hooks/hook_point.h"
#include "nn/modules.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Rows = std::vector<MemoryRow>;

Rows rows_at_end(const MemoryRecord& record, size_t step) {
  return alive_after(record, record.step_ends.at(step).events);
}

Rows only(const Rows& rows, MemoryCategory category) {
  Rows found;
  std::ranges::copy_if(rows, std::back_inserter(found), [&](const MemoryRow& row) { return row.category == category; });
  std::ranges::sort(found, {}, &MemoryRow::module);
  return found;
}

/// The most that is alive of a category at one time.
int64_t most_of(const MemoryRecord& record, MemoryCategory category) {
  int64_t alive = 0, most = 0;
  for (const auto& event : record.events) {
    const auto& block = record.blocks[event.block];
    if (block.category == category) {
      alive += event.begins ? block.bytes : -block.bytes;
      most = std::max(most, alive);
    }
  }
  return most;
}

/// Linear 3 to 5, ReLU, Linear 5 to 2: 32 parameters.
nn::Sequential small_model() {
  return nn::Sequential(nn::Linear(3, 5), nn::ReLU(), nn::Linear(5, 2));
}

/// The most bytes that libtorch's allocator says are alive, and no more than that.
struct AllocatorTotal final : c10::MemoryReportingInfoBase {
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* /*memory*/, int64_t /*bytes*/, size_t total, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    first = first < 0 ? static_cast<int64_t>(total) : first;
    most = std::max(most, static_cast<int64_t>(total));
  }
  int64_t first = -1, most = 0;
};

}  // namespace

TEST_CASE("activations, gradients and parameters of a small model have the bytes of their tensors") {
  auto model = small_model();
  MemoryTimeline timeline(model, {});
  {
    const auto output = model->forward(at::ones({4, 3}));
    timeline.end_step(1);
    output.sum().backward();
  }
  timeline.end_step(2);
  model->zero_grad();
  timeline.end_step(3);
  const auto record = timeline.stop();
  const Rows parameters = {{MemoryCategory::Parameters, "0", 80, 2}, {MemoryCategory::Parameters, "2", 48, 2}};
  const auto after_forward = rows_at_end(record, 0);
  expect_equal(only(after_forward, MemoryCategory::Parameters) == parameters, true);
  // ReLU's output, 4 x 5, which Linear 2 saves, and what the model returned.
  const Rows activations = {{MemoryCategory::Activations, "1", 80, 1}, {MemoryCategory::Activations, "2", 32, 1}};
  expect_equal(only(after_forward, MemoryCategory::Activations) == activations, true);
  const Rows input = {{MemoryCategory::Other, "outside of modules", 48, 1}};  // 4 x 3, which Linear 0 saves
  expect_equal(only(after_forward, MemoryCategory::Other) == input, true);
  expect_equal(total_bytes(after_forward), int64_t{128 + 112 + 48});
  const Rows gradients = {{MemoryCategory::Gradients, "0", 80, 2}, {MemoryCategory::Gradients, "2", 48, 2}};
  expect_equal(only(rows_at_end(record, 1), MemoryCategory::Gradients) == gradients, true);
  expect_equal(total_bytes(rows_at_end(record, 1)), int64_t{128 + 128});
  expect_equal(total_bytes(rows_at_end(record, 2)), int64_t{128});
}

TEST_CASE("the categories have in sum what the allocator counts") {
  auto model = small_model();
  const auto step = [&] {
    const auto input = at::ones({4, 3});
    const auto loss = model->forward(input).log_softmax(1).sum();  // outside of modules, but for backward
    loss.backward();
    model->zero_grad();
  };
  step();
  const auto counted = std::make_shared<AllocatorTotal>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counted);
    step();
  }
  MemoryTimeline timeline(model, {});
  step();
  const auto record = timeline.stop();
  const size_t peak = find_peak(record);
  const int64_t first = record.blocks[record.events[4].block].bytes;  // behind the parameters
  expect_equal(total_bytes(alive_after(record, peak)) - 128, counted->most - counted->first + first);
  const auto outside = only(alive_after(record, peak), MemoryCategory::Activations);
  expect_equal(std::ranges::count(outside, std::string("outside of modules"), &MemoryRow::module) > 0, true);
  expect_equal(most_of(record, MemoryCategory::ActivationGradients) > 0, true);
}

TEST_CASE("units' gathered parameters, sharded gradients and the optimizer's state are told apart") {
  run_ranks(2, [](int) {
    const auto linear = [] { return nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)); };
    nn::Sequential model(linear(), linear(), linear());
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    for (const auto& layer : model->children()) {
      fully_shard(*layer, {.mesh = mesh});
    }
    fully_shard(model, {.mesh = mesh});
    optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    MemoryTimeline timeline(model, {.optimizer = &optimizer});
    for (int64_t step = 1; step <= 2; ++step) {
      model->zero_grad();
      model->forward(at::ones({2, 64})).sum().backward();
      optimizer.step();
      timeline.end_step(step);
    }
    const auto stats = fsdp(*model->children().front()).memory_stats();
    const auto record = timeline.stop();
    constexpr int64_t kWhole = 64 * 64 * 4, kShard = kWhole / 2;
    const auto rows = rows_at_end(record, 1);
    const auto of_each = [](MemoryCategory category, int64_t bytes, int64_t blocks) {
      return Rows{{category, "0", bytes, blocks}, {category, "1", bytes, blocks}, {category, "2", bytes, blocks}};
    };
    using enum MemoryCategory;
    expect_equal(only(rows, OptimizerState) == of_each(OptimizerState, 2 * kShard, 2), true);
    for (const auto category : {Parameters, Gradients}) {
      const int64_t tags = total_bytes(only(rows, category)) - 3 * kShard;  // of what units send
      expect_equal(tags >= 0 && tags < 3 * 256, true);
    }
    constexpr int64_t kTags = 3 * 64;  // which the first gathers make, and keep
    expect_equal(total_bytes(only(rows, GatheredParameters)) <= kTags, true);
    expect_equal(total_bytes(only(rows, FreeBlocks)), static_cast<int64_t>(stats.held - stats.acquired));
    const int64_t most = most_of(record, GatheredParameters) - 2 * kWhole;  // the unit that computes, and the next one
    expect_equal(most >= 0 && most <= kTags, true);
    expect_equal(find_growth(record).empty(), true);
  });
}

TEST_CASE("a module that keeps 1 MiB a step is named, with what it keeps") {
  auto model = small_model();
  std::vector<at::Tensor> kept;
  const ScopedHook leak(
      hook_point(*model->named_children()["1"], "test").register_forward_hook([&](HookPoint&, TensorRefs) {
        kept.push_back(at::empty({1 << 18}));
      }));
  const TempFolder folder;
  MemoryTimelineSteps timeline(model, {.folder = folder.path("new/memory"), .steps = {2, 4}});
  for (int64_t step = 1; step <= 5; ++step) {
    timeline.begin_step(step);
    model->zero_grad();
    model->forward(at::ones({4, 3})).sum().backward();
    timeline.end_step(step);
  }
  const auto text = read_file(folder.path("new/memory/memory-rank-0.txt"));
  expect_equal(text.find("from the end of step 2 to that of step 4, these grew, in all by so much:") != text.npos,
               true);
  expect_equal(text.ends_with("         2097152        2  activations               1\n"), true);
  const auto picture = read_file(folder.path("new/memory/memory-rank-0.svg"));
  expect_equal(picture.starts_with("<svg") && picture.find("gradients of activations") != picture.npos, true);
}

TEST_CASE("gradients from before the recording end where they are freed") {
  auto model = small_model();
  const auto output = model->forward(at::ones({4, 3}));
  output.sum().backward();
  MemoryTimeline timeline(model, {});
  timeline.end_step(1);
  model->zero_grad();
  timeline.end_step(2);
  const auto record = timeline.stop();
  expect_equal(total_bytes(only(rows_at_end(record, 0), MemoryCategory::Gradients)), int64_t{128});
  expect_equal(total_bytes(only(rows_at_end(record, 1), MemoryCategory::Gradients)), int64_t{0});
}

TEST_CASE("a thread has one timeline of memory, which a trace may contain but not begin in") {
  const TempFolder folder;
  auto model = small_model();
  const auto peak_of_step = [&] {
    MemoryTimeline timeline(model, {});
    expect_throws<StateError>([&] { MemoryTimeline(model, {}); }, "another timeline");
    expect_throws<StateError>([&] { Trace(model, {.folder = folder.path()}); }, "has a MemoryTimeline");
    model->zero_grad();
    model->forward(at::ones({4, 3})).sum().backward();
    const auto record = timeline.stop();
    return total_bytes(alive_after(record, find_peak(record)));
  };
  peak_of_step();
  const auto alone = peak_of_step();
  Trace trace(model, {.folder = folder.path(), .ops = true});
  const auto traced = peak_of_step();
  trace.stop();
  expect_equal(traced, alone);
  expect_equal(peak_of_step(), alone);
}

}  // namespace tessera::testing
