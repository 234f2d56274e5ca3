// The peak of this process's memory follows what tensors take, and stays when they are gone.

#include "examples/train_gpt/peak_memory.h"

#include <ATen/ops/ones.h>

#include "third_party/catch2/catch.h"

namespace tessera::examples {
namespace {

TEST_CASE("peak memory on the CPU is the most that was resident") {
  const double before = peak_memory_bytes(at::kCPU);
  CHECK(before > 0);
  const auto bytes = static_cast<int64_t>(before) + (int64_t{32} << 20);  // more than all there was
  {
    const at::Tensor large = at::ones({bytes}, at::kByte);
    CHECK(peak_memory_bytes(at::kCPU) >= static_cast<double>(bytes));
  }
  const double after = peak_memory_bytes(at::kCPU);
  CHECK(after >= static_cast<double>(bytes));
  CHECK(after < 3 * static_cast<double>(bytes));  // bytes, not KiB
}

}  // namespace
}  // namespace tessera::examples
