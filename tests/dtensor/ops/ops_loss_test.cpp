#include <ATen/core/Reduction.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/huber_loss.h>
#include <ATen/ops/kl_div.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/nll_loss2d.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/smooth_l1_loss.h>
#include <ATen/ops/soft_margin_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Loss = std::function<at::Tensor(const Tensors&, int64_t reduction)>;

/// The loss under every reduction.
void append(std::vector<OpCase>& cases, const char* name, const std::vector<Input>& inputs, const Loss& loss) {
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    cases.push_back({.name = std::string(name) + ", reduction " + std::to_string(reduction),
                     .inputs = inputs,
                     .call = [=](const Tensors& x) -> Tensors { return {loss(x, reduction)}; }});
  }
}

}  // namespace

TEST_CASE("losses of two tensors", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {2, 1}}) {
    append(cases, "mse_loss", {{sizes}, {sizes}}, [](auto& x, auto r) { return at::mse_loss(x[0], x[1], r); });
    append(cases, "l1_loss", {{sizes}, {sizes}}, [](auto& x, auto r) { return at::l1_loss(x[0], x[1], r); });
    append(cases, "smooth_l1_loss", {{sizes}, {sizes}},
           [](auto& x, auto r) { return at::smooth_l1_loss(x[0], x[1], r, 0.5); });
    append(cases, "huber_loss", {{sizes}, {sizes}}, [](auto& x, auto r) { return at::huber_loss(x[0], x[1], r, 0.7); });
    append(cases, "soft_margin_loss", {{sizes}, {sizes}},
           [](auto& x, auto r) { return at::soft_margin_loss(x[0], x[1].detach().sign(), r); });
    append(cases, "binary_cross_entropy", {probability(sizes), probability(sizes)},
           [](auto& x, auto r) { return at::binary_cross_entropy(x[0], x[1].detach(), {}, r); });
    append(cases, "binary_cross_entropy_with_logits", {{sizes}, probability(sizes)},
           [](auto& x, auto r) { return at::binary_cross_entropy_with_logits(x[0], x[1], {}, {}, r); });
    append(cases, "kl_div", {{sizes}, probability(sizes)}, [](auto& x, auto r) { return at::kl_div(x[0], x[1], r); });
  }
  append(cases, "mse_loss, broadcast", {{{5, 3}}, {{3}}}, [](auto& x, auto r) { return at::mse_loss(x[0], x[1], r); });
  append(cases, "weighted binary_cross_entropy", {probability({5, 3}), probability({5, 3}), positive({3})},
         [](auto& x, auto r) { return at::binary_cross_entropy(x[0], x[1].detach(), x[2].detach(), r); });
  append(cases, "binary_cross_entropy_with_logits, pos_weight", {{{5, 3}}, probability({5, 3}), positive({3})},
         [](auto& x, auto r) { return at::binary_cross_entropy_with_logits(x[0], x[1], {}, x[2].detach(), r); });
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("negative log-likelihood", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  append(cases, "nll_loss", {{{5, 3}}, indices({5}, 3)},
         [](auto& x, auto r) { return at::nll_loss(x[0], x[1], {}, r); });
  append(cases, "nll_loss of few items", {{{2, 3}}, indices({2}, 3)},
         [](auto& x, auto r) { return at::nll_loss(x[0], x[1], {}, r); });
  append(cases, "nll_loss, ignored targets", {{{7, 3}}, indices({7}, 3)},
         [](auto& x, auto r) { return at::nll_loss(x[0], x[1], {}, r, 1); });
  append(cases, "nll_loss, weighted", {{{5, 3}}, indices({5}, 3), positive({3})},
         [](auto& x, auto r) { return at::nll_loss(x[0], x[1], x[2].detach(), r, 0); });
  append(cases, "nll_loss of one item", {{{3}}, indices({}, 3)},
         [](auto& x, auto r) { return at::nll_loss(x[0], x[1], {}, r); });
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const int64_t ignored : {-100, 1}) {
      cases.push_back({.name = fmt::format("total weight of one item, reduction {}, {} ignored", reduction, ignored),
                       .inputs = {{{3}}, indices({}, 3), positive({3})},
                       .call = [=](const Tensors& x) -> Tensors {
                         const auto [loss, weight] =
                             at::nll_loss_forward(x[0], x[1], x[2].detach(), reduction, ignored);
                         return {loss, weight};
                       }});
    }
  }
  for (const bool is_mean : {false, true}) {
    cases.push_back({.name = "total weight of images",
                     .inputs = {{{3, 4, 2, 5}}, indices({3, 2, 5}, 4)},
                     .call = [=](const Tensors& x) -> Tensors {
                       const int64_t reduction = is_mean ? at::Reduction::Mean : at::Reduction::None;
                       const auto weight = std::get<1>(at::nll_loss2d_forward(x[0], x[1], {}, reduction, 2));
                       return {is_mean || is_dtensor(weight) ? weight : at::zeros_like(weight)};  // unwritten by CUDA's
                     },
                     .gradients = false});
  }
  append(cases, "nll_loss2d", {{{3, 4, 2, 5}}, indices({3, 2, 5}, 4)},
         [](auto& x, auto r) { return at::nll_loss2d(x[0], x[1], {}, r, 2); });
  append(cases, "nll_loss2d, weighted", {{{3, 4, 2, 1}}, indices({3, 2, 1}, 4), positive({4})},
         [](auto& x, auto r) { return at::nll_loss2d(x[0], x[1], x[2].detach(), r); });
  append(cases, "cross_entropy", {{{5, 3}}, indices({5}, 3)},
         [](auto& x, auto r) { return at::cross_entropy_loss(x[0], x[1], {}, r); });
  append(cases, "cross_entropy, smoothed and weighted", {{{5, 3}}, indices({5}, 3), positive({3})},
         [](auto& x, auto r) { return at::cross_entropy_loss(x[0], x[1], x[2].detach(), r, -100, 0.1); });
  append(cases, "cross_entropy of probabilities", {{{5, 3}}, probability({5, 3})},
         [](auto& x, auto r) { return at::cross_entropy_loss(x[0], x[1], {}, r); });
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("a target that no class is, on one rank's part, is refused on every rank", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto logits = distribute_tensor(at::ones({5, 4}), mesh, {Shard(0)});
    for (const int64_t bad : {4, -1}) {
      const auto target =
          distribute_tensor(at::tensor(std::vector<int64_t>{0, bad, 3, 2, 1}, at::kLong), mesh, {Shard(0)});
      expect_throws<ValueError>([&] { at::cross_entropy_loss(logits, target); },
                                fmt::format("target {} is out of bounds; there are 4 classes", bad));
    }
    const auto ignored =
        distribute_tensor(at::tensor(std::vector<int64_t>{0, -7, 3, 2, 1}, at::kLong), mesh, {Shard(0)});
    TESSERA_EXPECT(at::cross_entropy_loss(logits, ignored, {}, 1, -7).item<float>() > 0);
  });
}

TEST_CASE("a mean over uneven shards counts all elements once", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({3}), mesh, {Shard(0)});
    x.set_requires_grad(true);
    const auto target = distribute_tensor(at::zeros({3}), mesh, {Shard(0)});
    const auto loss = at::mse_loss(x, target);
    loss.backward();
    expect_equal(full_tensor(loss.detach()).item<float>(), 1.f);
    expect_equal(full_tensor(x.grad())[2].item<float>(), 2.f / 3);
  });
}

TEST_CASE("means of losses whose sums 16 bits do not hold", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      const auto x = distribute_tensor(at::full({1000}, 20, dtype), mesh, {Shard(0)}).set_requires_grad(true);
      const auto target = distribute_tensor(at::zeros({1000}, dtype), mesh, {Shard(0)});
      const auto loss = at::mse_loss(x, target);
      expect_equal(full_tensor(loss.detach()).item<float>(), 400.f);
      (loss * 4096).backward();  // a scaled loss, whose value itself no one needs
      const auto grad = full_tensor(x.grad())[999].item<float>();
      expect_equal(x.grad().scalar_type(), dtype);
      TESSERA_EXPECT(std::abs(grad - 2 * 20 * 4096 / 1000.f) < 0.5f);
    }
    const auto logs = distribute_tensor(at::full({20000, 2}, -7, at::kHalf), mesh, {Shard(0)});
    const auto classes = distribute_tensor(at::zeros({20000}, at::kLong), mesh, {Shard(0)});
    expect_equal(full_tensor(at::nll_loss(logs, classes)).item<float>(), 7.f);
    const auto integers = distribute_tensor(at::ones({4}, at::kLong), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::mse_loss(integers, integers); }, "the mean of a loss of Long");
  });
}

TEST_CASE("a backward does not reduce the loss that it starts from", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({3}), mesh, {Shard(0)}).set_requires_grad(true);
    const auto loss = x.square().sum();
    const auto before = comm_stats().calls();
    loss.backward();
    expect_equal(comm_stats().calls(), before);
    expect_equal(to_string(placements(at::ones_like(loss))), "(Replicate())");
  });
}

}  // namespace tessera
