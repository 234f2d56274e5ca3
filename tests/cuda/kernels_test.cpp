// The kernels on a GPU against ATen there; what they refuse is seen without one.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "cuda/multi_copy.h"
#include "cuda/multi_norm.h"
#include "cuda/sharded_draw.h"
#include "tests/cuda/gpu_test.h"
#include "tests/cuda/shard_of_view.h"
#include "third_party/catch2/catch.h"

namespace tessera::cuda {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("dtypes that the copy kernel has") {
  CHECK(can_copy(at::kFloat, at::kBFloat16));
  CHECK(can_copy(at::kHalf, at::kBFloat16));
  CHECK(can_copy(at::kLong, at::kLong));
  CHECK(can_copy(at::kComplexDouble, at::kComplexDouble));
  CHECK_FALSE(can_copy(at::kDouble, at::kFloat));
  CHECK_FALSE(can_copy(at::kFloat, at::kInt));
  CHECK_THROWS_AS(MultiCopy(at::kFloat, at::kLong), NotImplementedError);
  CHECK_THROWS_WITH(MultiCopy(at::kFloat, at::kLong), ContainsSubstring("MultiCopy: Long to Float; equal dtypes"));
}

TEST_CASE("tensors that are not on a GPU are refused") {
  const auto host = at::zeros({4});
  MultiCopy copy(at::kFloat, at::kFloat);
  CHECK_THROWS_AS(copy.add(host, host, {.rows = 1, .cols = 4}), ValueError);
  CHECK_THROWS_WITH(copy.add(host, host, {.rows = 1, .cols = 4}),
                    ContainsSubstring("the target is on cpu; a contiguous CUDA tensor is needed"));
  CHECK_THROWS_WITH(copy.add_zeros(at::Tensor(), 0, 1), ContainsSubstring("the target is undefined"));
  copy.run();  // nothing was added
  CHECK_THROWS_AS(multi_tensor_norm({host}, NormKind::L2), ValueError);
  CHECK_THROWS_WITH(multi_tensor_norm(at::TensorList(), NormKind::L2), ContainsSubstring("no tensors"));
}

TEST_CASE("the message without a GPU names cause and remedy") {
  if (visible_devices() == 0) {
    CHECK_THAT(no_device_message(), ContainsSubstring("no CUDA device is visible: the CUDA runtime says \"") &&
                                        ContainsSubstring("nvidia-smi"));
  }
  CHECK_THROWS_WITH(check_cuda(cudaErrorInvalidValue, "here"),
                    ContainsSubstring("here: the CUDA runtime says") && ContainsSubstring("cudaErrorInvalidValue"));
  CHECK_THROWS_WITH(check_cuda(cudaErrorNoKernelImageForDevice, "here"), ContainsSubstring("cuda:architectures="));
}

/// More copies than a launch takes, wide and narrow ones, and zeros.
void check_copies(uint64_t seed, at::ScalarType to_dtype, at::ScalarType from_dtype) {
  CAPTURE(seed, to_dtype, from_dtype);
  std::mt19937_64 random(seed);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr int64_t kNumel = 4 << 20;
  const auto on_gpu = at::TensorOptions(at::kCUDA);
  const auto from = at::randint(-100, 100, {kNumel}, on_gpu.dtype(at::kFloat)).to(from_dtype);
  const auto expected = at::full({kNumel}, 7, on_gpu.dtype(to_dtype)), actual = expected.clone();
  MultiCopy copy(to_dtype, from_dtype);
  int64_t begin = 0;
  for (int i = 0; i < 150; ++i) {
    const int64_t unit = number(0, 1) == 1 ? 16 : 1, cols = number(0, i % 8 == 0 ? 100000 / unit : 600 / unit) * unit;
    const int64_t rows = cols > 8192 ? number(0, 2) : number(0, 20), stride = cols + number(0, 2) * unit;
    begin = (begin + unit - 1) / unit * unit;
    if (begin + rows * stride > kNumel) {
      break;
    }
    const int64_t from_begin = number(0, (kNumel - rows * stride) / unit) * unit;
    const auto target = expected.as_strided({rows, cols}, {stride, 1}, begin);
    if (rows == 1 && i % 3 == 0) {
      copy.add_zeros(actual, begin, cols);
      target.zero_();
    } else {
      copy.add(actual, from,
               {.to_offset = begin,
                .to_stride = stride,
                .from_offset = from_begin,
                .from_stride = stride,
                .rows = rows,
                .cols = cols});
      target.copy_(from.as_strided({rows, cols}, {stride, 1}, from_begin));
    }
    begin += rows * stride;
  }
  copy.run();
  CHECK(actual.equal(expected));
}

TEST_CASE("copies and casts on the GPU are ATen's") {
  if (skip_without_devices(1)) {
    return;
  }
  const at::ScalarType floating[] = {at::kFloat, at::kBFloat16, at::kHalf};
  for (uint64_t seed = 0; seed < 3; ++seed) {
    for (const auto to : floating) {
      for (const auto from : floating) {
        check_copies(seed, to, from);
      }
    }
    for (const auto dtype : {at::kChar, at::kLong, at::kDouble, at::kComplexDouble}) {
      check_copies(seed, dtype, dtype);
    }
  }
}

TEST_CASE("casts round as ATen does") {
  if (skip_without_devices(1)) {
    return;
  }
  auto from = at::randn({1 << 16}, at::TensorOptions(at::kCUDA)) * 1e3;
  from.narrow(0, 0, 3).copy_(at::full({3}, std::numeric_limits<float>::infinity()));
  const auto to = at::empty({1 << 16}, from.options().dtype(at::kBFloat16));
  MultiCopy copy(at::kBFloat16, at::kFloat);
  copy.add(to, from, {.rows = 1, .cols = 1 << 16});
  copy.run();
  CHECK(to.equal(from.to(at::kBFloat16)));
}

TEST_CASE("shapes that leave a tensor are refused") {
  if (skip_without_devices(1)) {
    return;
  }
  const auto tensor = at::zeros({10}, at::TensorOptions(at::kCUDA));
  MultiCopy copy(at::kFloat, at::kFloat);
  CHECK_THROWS_AS(copy.add(tensor, tensor, {.to_stride = 6, .from_stride = 5, .rows = 2, .cols = 5}), ValueError);
  CHECK_THROWS_AS(copy.add(tensor, tensor, {.from_offset = 6, .rows = 1, .cols = 5}), ValueError);
  CHECK_THROWS_AS(copy.add_zeros(tensor, -1, 5), ValueError);
  CHECK_THROWS_AS(copy.add(tensor, tensor.to(at::kLong), {.rows = 1, .cols = 1}), ValueError);
}

TEST_CASE("norms on the GPU are ATen's, and the same bits each time") {
  if (skip_without_devices(1)) {
    return;
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    std::vector<at::Tensor> tensors;
    double ones = 0, squares = 0, largest = 0;
    for (int64_t i = 0; i < 200; ++i) {
      tensors.push_back(at::randn({i * i * 7}, at::TensorOptions(at::kCUDA)).to(dtype));
      const auto wide = tensors.back().to(at::kDouble).abs();
      ones += wide.sum().item<double>();
      squares += (wide * wide).sum().item<double>();
      largest = i == 0 ? 0 : std::max(largest, wide.max().item<double>());
    }
    CAPTURE(dtype);
    const auto l2 = multi_tensor_norm(tensors, NormKind::L2);
    CHECK(l2.item<double>() == Catch::Approx(squares).epsilon(1e-4));
    CHECK(multi_tensor_norm(tensors, NormKind::L1).item<double>() == Catch::Approx(ones).epsilon(1e-4));
    CHECK(multi_tensor_norm(tensors, NormKind::Inf).item<double>() == largest);
    CHECK(multi_tensor_norm(tensors, NormKind::L2).equal(l2));
    tensors[150][77] = std::numeric_limits<double>::quiet_NaN();
    CHECK(std::isnan(multi_tensor_norm(tensors, NormKind::Inf).item<double>()));
  }
}

TEST_CASE("drawing a shard refuses what it has no kernel for") {
  if (skip_without_devices(1)) {
    return;
  }
  const ShardOfWhole shard{.sizes = {4}, .whole_strides = {1}, .local_strides = {1}, .whole_numel = 4};
  for (const auto dtype : {at::kLong, at::kBool, at::kComplexFloat}) {
    const auto local = at::zeros({4}, at::TensorOptions(at::kCUDA).dtype(dtype));
    CHECK_FALSE(draw_shard(local, shard, {}, at::globalContext().defaultGenerator(local.device())));
  }
}

/// Rows and columns of a whole tensor that ATen draws, and where each leaves the generator.
void check_shards(const DrawParameters& parameters, at::ScalarType dtype,
                  const std::function<void(const at::Tensor&, const at::Generator&)>& draw_whole) {
  CAPTURE(parameters.distribution, dtype);
  const auto options = at::TensorOptions(at::kCUDA).dtype(dtype);
  auto generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, 0));
  const auto start = [&] {
    generator.set_current_seed(3);
    generator.set_offset(16);
  };
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{7, 3}, {1000, 33}, {3000, 1111}}) {
    start();
    const auto whole = at::empty(sizes, options);
    draw_whole(whole, generator);
    const uint64_t offset = generator.get_offset();
    for (const auto& part : {whole, whole.narrow(0, 3, 4), whole.narrow(1, 1, 2), whole.narrow(0, 2, 0)}) {
      start();
      const auto local = at::zeros(part.sizes(), options);
      REQUIRE(draw_shard(local, shard_of_view(part, whole, local.strides()), parameters, generator));
      CHECK(local.equal(part));
      CHECK(generator.get_offset() == offset);
    }
  }
}

TEST_CASE("a shard's random numbers are those of the whole tensor that ATen draws") {
  if (skip_without_devices(1)) {
    return;
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    check_shards({Distribution::Normal, -1, 0.02}, dtype,
                 [](const at::Tensor& whole, const at::Generator& generator) { whole.normal_(-1, 0.02, generator); });
    check_shards({Distribution::Uniform, -0.3, 0.7}, dtype,
                 [](const at::Tensor& whole, const at::Generator& generator) { whole.uniform_(-0.3, 0.7, generator); });
  }
  for (const auto dtype : {at::kBool, at::kFloat, at::kDouble}) {
    check_shards({Distribution::Bernoulli, 0.9, 0}, dtype,
                 [](const at::Tensor& whole, const at::Generator& generator) { whole.bernoulli_(0.9, generator); });
  }
}

TEST_CASE("a shard of a tensor that 32 bits cannot address") {
  if (skip_without_devices(1)) {
    return;
  }
  const auto whole = at::empty({3, int64_t{1} << 29}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));  // 3 GiB
  auto generator = at::globalContext().defaultGenerator(whole.device());
  generator.set_current_seed(4);
  whole.normal_(0, 1, generator);
  generator.set_current_seed(4);
  const auto part = whole.narrow(1, 5000, 100'000);
  const auto local = at::zeros(part.sizes(), part.options());
  const auto shard = shard_of_view(part, whole, local.strides());
  REQUIRE(draw_shard(local, shard, {Distribution::Normal, 0, 1}, generator));
  CHECK(local.equal(part));
}

}  // namespace
}  // namespace tessera::cuda
