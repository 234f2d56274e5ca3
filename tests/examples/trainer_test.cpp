// train_gpt's steps on a GPU, or a simulated one.

#include "examples/train_gpt/trainer.h"

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera::examples {

namespace {

TrainOptions small_options(bool bf16, int64_t accumulate) {
  TrainOptions options;
  options.model = {.dim = 16, .layers = 2, .heads = 2, .context = 8};
  options.batch = 4;
  options.accumulate = accumulate;
  options.steps = 8;
  options.warmup = 2;
  options.layout.device = at::kCUDA;
  options.layout.bf16 = bf16;
  return options;
}

std::vector<double> losses(TrainOptions options, const ByteData& data, bool captured) {
  options.captured = captured;
  const auto mesh = init_device_mesh(at::kCUDA, {1, 1, 1}, {"replicate", "dp", "tp"});
  Trainer trainer(options, data, Layout::sharded(mesh));
  std::vector<double> result;
  for (int64_t step = 0; step < options.steps; ++step) {
    result.push_back(trainer.train_step(step));
  }
  return result;
}

}  // namespace

TEST_CASE("captured steps have the losses of others, whose learning rates are not rounded to float32") {
  const testing::TempFolder folder;
  const auto path = folder.path("text.txt");
  std::ofstream file(path);
  for (int i = 0; i < 500; ++i) {
    file << "line " << i << " of a text\n";
  }
  file.close();
  const bool bf16 = GENERATE(false, true);
  const int64_t accumulate = GENERATE(1, 2);
  for (const c10::Device device : test_devices()) {
    if (device.is_cpu()) {
      continue;
    }
    run_ranks(1, [&](int) {
      const auto options = small_options(bf16, accumulate);
      const ByteData data(path, options.model.context, options.seed);
      const auto expected = losses(options, data, false), actual = losses(options, data, true);
      expect_equal(expected.back() < expected.front(), true);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_equal(std::abs(actual[i] - expected[i]) < 1e-6 * expected[i], true);
      }
    });
  }
}

}  // namespace tessera::examples
