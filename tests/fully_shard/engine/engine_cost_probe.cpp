// What engine_cost_test runs under callgrind: forward and backward of the tiny model of benchmarks/train_model.h, plain
// and under fully_shard over 2 ranks of the fake backend, which moves no data; and how ranks that share memory find all
// parameters of a unit, one after the other.

#include <ATen/ops/zeros.h>

#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "benchmarks/train_model.h"
#include "comm/backend/tensor_segment.h"
#include "comm/process_group.h"
#include "testing/callgrind.h"

namespace {

void count_parts(int64_t count) {
  using namespace tessera;
  constexpr int64_t kNumel = 16;
  std::vector<TensorSegment> parts;
  for (int64_t i = 0; i < count; ++i) {
    parts.push_back({.offset = i * kNumel, .numel = kNumel, .tensor = at::zeros({2 * kNumel})});
  }
  std::array<float, kNumel> room{};
  constexpr auto kBytes = static_cast<int64_t>(sizeof(room));
  testing::count_instructions("parts " + std::to_string(count), 1, [&] {
    for (int64_t i = 0; i < count; ++i) {
      const PartRange range{.dtype = at::kFloat, .rank = 1, .begin = i * kBytes, .bytes = kBytes};
      TESSERA_ASSERT(find_in_parts(parts, range).tensor == &parts[static_cast<size_t>(i)].tensor, "part {}", i);
      read_segments(parts, range, reinterpret_cast<char*>(room.data()), kBytes + 1);
      write_segments(parts, range, reinterpret_cast<char*>(room.data()), kBytes + 1);
    }
  });
}

}  // namespace

int main() {
  using namespace tessera;
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const TrainModel plain = make_train_model("tiny"), sharded = make_train_model("tiny");
  shard(sharded);
  testing::count_instructions("plain", 10, make_step(plain, Optimizer::None));
  testing::count_instructions("sharded", 10, make_step(sharded, Optimizer::None));
  destroy_process_group();
  count_parts(400);
  count_parts(1600);
  return 0;
}
