// The copies between flat buffers and parameters, by memcpy, by ops and by kernels, against loops over the elements.

#include "fully_shard/layout/block_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>

#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

const std::vector<std::vector<int64_t>> kShapes{{5, 3}, {2}, {0, 4}, {6, 10, 16}, {1, 7}, {40, 300}};
const std::vector<int64_t> kDims{0, 0, 0, 1, 1, 1};

/// to[...] = from[...] for each element of the block, one by one.
void copy_elements(const at::Tensor& to, int64_t to_offset, int64_t to_stride, const at::Tensor& from,
                   int64_t from_offset, int64_t from_stride, const BlockCopy& copy) {
  const auto targets = to.view(-1), sources = from.view(-1);
  for (int64_t row = 0; row < copy.rows; ++row) {
    targets.narrow(0, to_offset + row * to_stride, copy.cols)
        .copy_(sources.narrow(0, from_offset + row * from_stride, copy.cols));
  }
}

TEST_CASE("copy-out and copy-in with zeros, on every device, of equal dtypes and with a cast", "[block_copy]") {
  const auto [param_dtype, flat_dtype] =
      GENERATE(std::pair{at::kFloat, at::kFloat}, std::pair{at::kFloat, at::kBFloat16},
               std::pair{at::kHalf, at::kFloat}, std::pair{at::kLong, at::kLong}, std::pair{at::kDouble, at::kFloat});
  const int64_t ranks = GENERATE(1, 2, 3, 5);
  CAPTURE(param_dtype, flat_dtype, ranks);
  const auto layout = make_param_layout(kShapes, ranks, kDims);
  const int64_t rank_numel = layout.shard_numel + kSlotAlignment;
  for (const c10::Device device : test_devices()) {
    CAPTURE(device);
    const auto on_device = at::TensorOptions(device);
    // Small integers are exact in all of these dtypes.
    const auto gathered = at::randint(-100, 100, {ranks * rank_numel}, on_device.dtype(at::kFloat)).to(flat_dtype);
    const auto filled = at::full({ranks * rank_numel}, 3, on_device.dtype(flat_dtype)),
               expected_filled = filled.clone();
    std::vector<at::Tensor> params, expected;
    BlockCopier out;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      params.push_back(at::full(kShapes[i], 9, on_device.dtype(param_dtype)));
      expected.push_back(params[i].clone());
      const auto copies = layout.copies(layout.slots[i], rank_numel);
      out.from_flat(params[i], gathered, copies);
      for (const auto& copy : copies) {
        copy_elements(expected[i], copy.param_offset, copy.param_stride, gathered, copy.flat_offset, copy.flat_stride,
                      copy);
      }
    }
    out.run();
    BlockCopier in;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      CAPTURE(i);
      CHECK(params[i].equal(expected[i]));
      const auto copies = layout.copies(layout.slots[i], rank_numel);
      in.to_flat(params[i], filled, copies);
      for (const auto& copy : copies) {
        copy_elements(expected_filled, copy.flat_offset, copy.flat_stride, params[i], copy.param_offset,
                      copy.param_stride, copy);
      }
    }
    in.zero(filled, layout.unused(rank_numel));
    in.run();
    for (const auto& range : layout.unused(rank_numel)) {
      expected_filled.narrow(0, range.offset, range.numel).zero_();
    }
    CHECK(filled.equal(expected_filled));
  }
}

}  // namespace
}  // namespace tessera
