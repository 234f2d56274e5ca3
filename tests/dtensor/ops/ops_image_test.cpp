// Convolutions, pooling, padding, resampling and batch norms.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/fft_fft.h>
#include <ATen/ops/fft_irfftn.h>
#include <ATen/ops/fft_rfft2.h>
#include <ATen/ops/grid_sampler.h>
#include <ATen/ops/im2col.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pixel_shuffle.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/reflection_pad2d.h>
#include <ATen/ops/replication_pad2d.h>
#include <ATen/ops/replication_pad3d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("convolutions", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "conv2d",
       .inputs = {{{3, 2, 5, 4}}, {{5, 2, 3, 3}}, {{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::conv2d(x[0], x[1], x[2], 2, 1)}; }},
      {.name = "conv2d of one item and channel, without bias",
       .inputs = {{{1, 1, 4, 4}}, {{1, 1, 2, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {at::conv2d(x[0], x[1])}; }},
      {.name = "conv1d in groups, dilated",
       .inputs = {{{2, 4, 7}}, {{6, 2, 3}}, {{6}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::conv1d(x[0], x[1], x[2], at::IntArrayRef{1}, at::IntArrayRef{0}, at::IntArrayRef{2}, 2)};
       }},
      {.name = "conv2d without batch",
       .inputs = {{{2, 4, 4}}, {{3, 2, 3, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::conv2d(x[0], x[1])}; }},
      {.name = "conv_transpose2d",
       .inputs = {{{2, 3, 3, 3}}, {{3, 2, 2, 2}}, {{2}}},
       .call = [](const Tensors& x) -> Tensors { return {at::conv_transpose2d(x[0], x[1], x[2], 2, 0, 1)}; }},
  }));
}

TEST_CASE("a cut batch, or cut output channels, are convolved without communication", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto items = distribute_tensor(at::ones({3, 2, 4, 4}), mesh, {Shard(0)});
    const auto weight = distribute_tensor(at::ones({4, 2, 3, 3}), mesh, {Replicate()});
    const auto whole = distribute_tensor(at::ones({3, 2, 4, 4}), mesh, {Replicate()});
    const auto columns = distribute_tensor(at::ones({4, 2, 3, 3}), mesh, {Shard(0)});
    reset_comm_stats();
    expect_equal(to_string(placements(at::conv2d(items, weight))), "(Shard(0))");
    expect_equal(to_string(placements(at::conv2d(whole, columns))), "(Shard(1))");
    expect_equal(to_string(placements(at::max_pool2d(items, 2))), "(Shard(0))");
    expect_equal(comm_stats().calls(), 0);
  });
}

TEST_CASE("what works within images, or along other dims, is computed batch by batch without communication",
          "[dtensor][ops]") {
  const std::vector<std::pair<std::vector<int64_t>, std::function<at::Tensor(const at::Tensor&)>>> calls = {
      {{3, 2, 4, 5},
       [](const at::Tensor& x) {
         return at::reflection_pad2d(x, {1, 2, 0, 3});
       }},
      {{3, 2, 4, 5},
       [](const at::Tensor& x) {
         return at::replication_pad2d(x, {1, 2, 0, 3});
       }},
      {{3, 2, 3, 4, 5},
       [](const at::Tensor& x) {
         return at::replication_pad3d(x, {1, 2, 0, 3, 1, 1});
       }},
      {{3, 2, 5, 4, 6},
       [](const at::Tensor& x) {
         return at::max_pool3d(x, {2, 3, 2}, 2, {1, 1, 0}, 1, true);
       }},
      {{3, 2, 5, 6},
       [](const at::Tensor& x) {
         return at::im2col(x, {2, 3}, {1, 1}, {1, 0}, {2, 1});
       }},
      {{3, 2, 4, 4},
       [](const at::Tensor& x) {
         return at::grid_sampler(x, x.narrow(1, 0, 1).squeeze(1).unflatten(2, {2, 2}), 0, 1, true);
       }},
      {{3, 5, 6}, [](const at::Tensor& x) { return at::view_as_real(at::fft_fft(x, {}, 1)); }},
      {{3, 5, 6, 2},
       [](const at::Tensor& x) {
         return at::fft_irfftn(at::view_as_complex(x), at::IntArrayRef({5, 9}), at::IntArrayRef({1, 2}));
       }},
      // The last: autograd's formula copies its gradient into new zeros, which no rank cuts.
      {{3, 5, 6}, [](const at::Tensor& x) { return at::view_as_real(at::fft_rfft2(x)); }},
  };
  run_ranks(4, [&](int) {  // of a batch of 3 the last rank has nothing
    const auto mesh = init_device_mesh(at::kCPU, {4});
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& [sizes, call] = calls[i];
      const auto plain = at::randn(sizes, make_generator(i)).requires_grad_();
      const auto cut = distribute_tensor(plain.detach(), mesh, {Shard(0)}).requires_grad_();
      const auto expected = call(plain);
      expected.square().sum().backward();
      reset_comm_stats();
      const auto actual = call(cut);
      const auto in_forward = comm_stats().calls();
      actual.square().sum().backward();
      const int in_backward = i + 1 == calls.size() ? 1 : 0;
      expect_equal(
          fmt::format("call {}: {}, {} collectives, {}", i, in_forward, comm_stats().calls(), placements(actual)),
          fmt::format("call {}: 0, {} collectives, {}", i, in_backward, Placements{Shard(0)}));
      expect_close(full_tensor(actual.detach()), expected.detach());
      expect_close(full_tensor(cut.grad()), plain.grad());
    }
  });
}

TEST_CASE("pooling, padding and resampling", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "max_pool2d",
       .inputs = {{{3, 2, 4, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::max_pool2d(x[0], 2)}; }},
      {.name = "max_pool2d of one item",
       .inputs = {{{1, 1, 4, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::max_pool2d(x[0], 2)}; }},
      {.name = "avg_pool2d without batch",
       .inputs = {{{3, 4, 5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::avg_pool2d(x[0], 2)}; }},
      {.name = "avg_pool3d of no items, of one channel",
       .inputs = {{{0, 1, 4, 5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::avg_pool3d(x[0], 2)}; }},
      {.name = "adaptive_avg_pool2d",
       .inputs = {{{1, 3, 4, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::adaptive_avg_pool2d(x[0], {2, 3})};
       }},
      {.name = "reflection_pad2d",
       .inputs = {{{2, 1, 3, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::reflection_pad2d(x[0], {1, 2, 0, 1})};
       }},
      {.name = "upsample_nearest1d",
       .inputs = {{{3, 2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::upsample_nearest1d(x[0], {6})}; }},
      {.name = "upsample_bilinear2d",
       .inputs = {{{1, 3, 3, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::upsample_bilinear2d(x[0], {5, 6}, false)};
       }},
      {.name = "grid_sampler",
       .inputs = {{{2, 2, 3, 4}}, probability({2, 3, 2, 2})},
       .call = [](const Tensors& x) -> Tensors { return {at::grid_sampler(x[0], x[1], 0, 0, false)}; }},
      {.name = "pixel_shuffle",
       .inputs = {{{2, 4, 3, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {at::pixel_shuffle(x[0], 2)}; }},
  }));
}

namespace {

OpCase batch_norm_case(const char* name, std::vector<int64_t> sizes, bool training) {
  const int64_t channels = sizes[1];
  return {.name = name,
          .inputs = {{std::move(sizes)}, {{channels}}, {{channels}}, {{channels}}, positive({channels})},
          .call = [training](const Tensors& x) -> Tensors {
            const auto mean = x[3].detach().clone(), var = x[4].detach().clone();
            const auto y = at::batch_norm(x[0], x[1], x[2], mean, var, training, 0.1, 1e-5, false);
            return {y, mean, var};
          }};
}

}  // namespace

TEST_CASE("results of channels-last tensors lie as they say they do, on every rank", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    auto generator = make_generator(1);
    const auto image = at::randn({2, 4, 5, 5}, generator), weight = at::randn({4, 4, 3, 3}, generator);
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(image, mesh, {Shard(0)}).contiguous(at::MemoryFormat::ChannelsLast);
    const auto kernel = distribute_tensor(weight, mesh, {Replicate()});
    const auto y = at::conv2d(x, kernel);
    expect_equal(to_local(y).is_contiguous(), y.is_contiguous());
    auto rows = y.flatten(1);
    rows.relu_();
    expect_close(full_tensor(y), at::conv2d(image, weight).relu());
    expect_close(full_tensor(at::adaptive_avg_pool2d(x, {2, 3}).flatten(1)),
                 at::adaptive_avg_pool2d(image, {2, 3}).flatten(1));
  });
}

TEST_CASE("pooling of what needs no gradient, for which ATen has other kernels", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "max_pool1d",
       .inputs = {{{2, 3, 7}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::max_pool1d(x[0], 2), at::max_pool1d(x[0], 3, 1, 1, 2, /*ceil_mode=*/true)};
       },
       .gradients = false},
      {.name = "max_pool1d, with gradients",
       .inputs = {{{2, 3, 7}}},
       .call = [](const Tensors& x) -> Tensors { return {at::max_pool1d(x[0], 2)}; }},
      {.name = "max_pool2d, max_pool3d",
       .inputs = {{{2, 3, 4, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::max_pool2d(x[0], 2), at::max_pool3d(x[0], 2)};
       },
       .gradients = false},
      {.name = "others",
       .inputs = {{{2, 3, 4, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::avg_pool2d(x[0], 2), at::adaptive_avg_pool2d(x[0], {2, 1}),
                 std::get<0>(at::adaptive_max_pool2d(x[0], {2, 3}))};
       },
       .gradients = false},
  }));
}

TEST_CASE("a batch norm in eval mode does not write its statistics", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({3, 2, 4}), mesh, {Shard(0)}).requires_grad_();
    // from_local: a write of the local tensors is one of the DTensors, for autograd too.
    const auto mean = from_local(at::zeros({2}), mesh, {Replicate()}),
               var = from_local(at::ones({2}), mesh, {Replicate()});
    const auto version = mean._version();
    const auto y = at::batch_norm(x, {}, {}, mean, var, /*training=*/false, 0.1, 0, /*cudnn_enabled=*/false);
    expect_equal(mean._version(), version);
    y.sum().backward(/*gradient=*/{}, /*retain_graph=*/true);
    expect_equal(full_tensor(x.grad()).sum().item<float>(), 24.f);
    var.fill_(4);
    expect_throws<c10::Error>([&] { y.sum().backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("a batch norm in training writes statistics of from_local, and backward goes on", "[dtensor][ops]") {
  const auto generator = make_generator(3);
  const auto plain = at::randn({3, 2, 4}, generator);
  const auto norm = [](const at::Tensor& x, const at::Tensor& mean, const at::Tensor& var) {
    return at::batch_norm(x, {}, {}, mean, var, /*training=*/true, 0.1, 1e-5, /*cudnn_enabled=*/false);
  };
  const auto mean = at::zeros({2}), var = at::ones({2}), leaf = plain.clone().requires_grad_();
  norm(leaf, mean, var).pow(3).sum().backward();
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(plain, mesh, {Shard(0)}).requires_grad_();
    const auto local = at::zeros({2});
    const auto own_mean = from_local(local, mesh, {Replicate()}),
               own_var = from_local(at::ones({2}), mesh, {Replicate()});
    const auto version = local._version();
    const auto y = norm(x, own_mean, own_var);
    TESSERA_EXPECT(local._version() > version);
    y.pow(3).sum().backward();
    expect_close(x.grad(), leaf.grad());
    expect_close(own_mean, mean);
    expect_close(local, mean);
    expect_close(own_var, var);
  });
}

TEST_CASE("batch norms and their running statistics", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      batch_norm_case("batch_norm, training", {4, 3, 2}, true),
      batch_norm_case("batch_norm, training, of one channel", {3, 1, 2, 2}, true),
      batch_norm_case("batch_norm, eval", {3, 2, 2}, false),
      batch_norm_case("batch_norm, eval, of one item", {1, 5}, false),
      {.name = "batch_norm without weight and statistics",
       .inputs = {{{3, 2, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::batch_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false)};
       }},
  }));
}

}  // namespace tessera
