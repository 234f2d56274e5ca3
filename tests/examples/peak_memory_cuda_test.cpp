// The peak of a GPU's memory, under --config=cuda.

#include <ATen/ops/zeros.h>

#include "examples/train_gpt/peak_memory.h"
#include "tests/cuda/gpu_test.h"

namespace tessera::examples {
namespace {

TEST_CASE("peak memory on a GPU is the most that tensors had") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  constexpr int64_t kBytes = int64_t{64} << 20;
  const at::Tensor small = at::zeros({1}, at::TensorOptions(at::kCUDA));  // the allocator knows the device from here on
  const double before = peak_memory_bytes(at::kCUDA);
  { const at::Tensor large = at::zeros({kBytes}, at::TensorOptions(at::kCUDA).dtype(at::kByte)); }
  CHECK(peak_memory_bytes(at::kCUDA) >= static_cast<double>(kBytes));
  CHECK(peak_memory_bytes(at::kCUDA) <= before + static_cast<double>(2 * kBytes));
}

}  // namespace
}  // namespace tessera::examples
