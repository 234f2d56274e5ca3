// Checkpoints of models on every device that there is: files do not tell it, and each loads those of the others.

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "checkpoint/checkpointer.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Trains `steps` steps on a stream of the rank's own, and saves.
void train_and_save_on(const TestLayout& layout, c10::Device device, const std::string& path) {
  run_ranks(layout.ranks, [&](int) {
    const OwnStream stream(device);
    TestTrainer trainer(layout, 1, device);
    trainer.train(0);
    trainer.train(1);
    trainer.save(path, 2);
  });
}

void expect_same_model(TestTrainer& actual, TestTrainer& expected) {
  const auto wanted = expected.state().model;
  for (const auto& [key, value] : actual.state().model) {
    expect_close(std::get<at::Tensor>(value).cpu(), std::get<at::Tensor>(wanted.at(key)).cpu());
  }
}

}  // namespace

TEST_CASE("devices: a checkpoint goes from each device and layout to each other", "[checkpoint]") {
  const TempFolder folder;
  const std::string from = GENERATE(as<std::string>(), "3", "2x2 HSDP", "2x2 FSDP+TP");
  for (const c10::Device saves : test_devices()) {
    const auto path = folder.path(from + " " + saves.str());
    train_and_save_on(test_layout(from), saves, path);
    for (const c10::Device loads : test_devices()) {
      CAPTURE(from, saves, loads);
      const TestLayout to = test_layout("2");
      run_ranks(to.ranks, [&](int) {
        const OwnStream stream(loads);
        TestTrainer resumed(to, 2, loads), through(to, 1, loads);
        TESSERA_EXPECT(resumed.load(path) == 2);
        through.train(0);
        through.train(1);
        through.train(2);
        resumed.train(2);
        expect_same_model(resumed, through);
      });
    }
  }
}

TEST_CASE("devices: what is saved while training goes on is what was there when it was asked for", "[checkpoint]") {
  const TempFolder folder;
  for (const c10::Device device : test_devices()) {
    CAPTURE(device);
    const TestLayout layout = test_layout("3");
    const auto root = folder.path(device.str());
    run_ranks(layout.ranks, [&](int) {
      const OwnStream stream(device);
      TestTrainer trainer(layout, 1, device), then(layout, 1, device), loaded(layout, 2, device);
      trainer.train(0);
      then.train(0);
      auto state = trainer.state();
      state.user["step"] = int64_t{1};
      dcp::Checkpointer checkpointer(root);
      checkpointer.async_save(1, state);
      trainer.train(1);
      checkpointer.wait();
      TESSERA_EXPECT(loaded.load(*checkpointer.latest()) == 1);
      expect_same_model(loaded, then);
    });
  }
}

TEST_CASE("devices: the thread that writes has its rank's GPU current", "[checkpoint]") {
  if (test_devices().size() == 1) {
    return;
  }
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const c10::impl::VirtualGuardImpl gpus(c10::kCUDA);
    const c10::Device own(c10::kCUDA, static_cast<c10::DeviceIndex>(std::max(0, gpus.deviceCount() - 1 - rank)));
    const c10::DeviceGuard guard(own);
    std::optional<c10::Device> of_thread;
    dcp::Checkpointer checkpointer(
        folder.path("run"), {.progress = [&](const dcp::Progress& /*progress*/) { of_thread = gpus.getDevice(); }});
    checkpointer.async_save(1, {.model = {{fmt::format("of rank {}", rank), at::ones({4})}}});
    checkpointer.wait();
    TESSERA_EXPECT(of_thread == own);
  });
}

}  // namespace tessera::testing
