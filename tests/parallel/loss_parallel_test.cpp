#include "parallel/loss_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/softmax.h>
#include <c10/core/InferenceMode.h>

#include "base/error.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct LossCase {
  std::string name;
  std::vector<int64_t> sizes;  // of the logits
  int64_t reduction = at::Reduction::Mean;
  double label_smoothing = 0;
  int64_t ignore_index = -100;
  bool weighted = false;
  bool probabilities = false;

  int64_t class_dim() const { return sizes.size() == 1 ? 0 : 1; }
  int64_t classes() const { return sizes[static_cast<size_t>(class_dim())]; }

  at::Tensor target() const {
    auto target_sizes = sizes;
    if (probabilities) {
      return make_input(2, sizes).softmax(class_dim());
    }
    target_sizes.erase(target_sizes.begin() + class_dim());
    return at::randint(classes(), target_sizes, make_generator(2), at::kLong);
  }

  at::Tensor operator()(const at::Tensor& logits, const at::Tensor& target) const {
    const std::optional<at::Tensor> weight = make_input(3, {classes()}).square().add(0.5);
    return at::cross_entropy_loss(logits, target, weighted ? weight : std::nullopt, reduction, ignore_index,
                                  label_smoothing);
  }
};

std::vector<LossCase> loss_cases() {
  std::vector<LossCase> cases;
  for (const int64_t classes : {1, 3, 16, 17}) {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      const auto name = [&](const char* what) {
        return fmt::format("{}, {} classes, reduction {}", what, classes, static_cast<int>(reduction));
      };
      cases.push_back({name("rows"), {6, classes}, reduction});
      cases.push_back({name("one item"), {classes}, reduction});
      cases.push_back({name("sequences"), {2, classes, 5}, reduction});
      cases.push_back({name("images"), {2, classes, 3, 2}, reduction, 0.1});
      cases.push_back({name("volumes"), {2, classes, 1, 3, 2}, reduction});
      cases.push_back({name("smoothed"), {6, classes}, reduction, 0.2});
      cases.push_back({name("ignored"), {9, classes}, reduction, 0, classes - 1});
      cases.push_back({name("smoothed, ignored"), {9, classes}, reduction, 0.1, 0});
      cases.push_back({name("weighted"), {6, classes}, reduction, 0, -100, true});
      cases.push_back({name("weighted, smoothed, ignored"), {9, classes}, reduction, 0.1, classes / 2, true});
      cases.push_back({name("probabilities"), {6, classes}, reduction, 0.1, -100, true, true});
    }
  }
  return cases;
}

/// Nothing as large as the logits is sent: only numbers that come one a target. A view does not keep the cut of a dim
/// of size 1, so logits of one class may be.
void expect_no_gathering(const CommDebugMode& mode, const LossCase& test) {
  if (test.classes() == 1) {
    return;
  }
  expect_equal(mode.calls(Collective::AllGather), 0);
  expect_equal(mode.calls(Collective::AllToAll), 0);
  expect_equal(mode.calls(Collective::ReduceScatter), 0);
}

void check_loss(const LossCase& test, const DeviceMesh& mesh) {
  auto expected_logits = make_input(1, test.sizes).set_requires_grad(true);
  const auto target = test.target();
  const auto expected = test(expected_logits, target);
  (expected * expected).sum().backward();

  auto logits = distribute_tensor(make_input(1, test.sizes), mesh, {Shard(test.class_dim())}).set_requires_grad(true);
  CommDebugMode mode;
  const LossParallel scope;
  const auto loss = test(logits, target);
  expect_no_gathering(mode, test);
  const auto whole_loss = full_tensor(loss);
  expect_close(whole_loss.detach(), expected.detach(), kDoubleTolerance);
  (whole_loss * whole_loss).sum().backward();
  expect_no_gathering(mode, test);
  if (test.classes() > 1) {
    expect_equal(to_string(placements(logits.grad())), to_string(placements(logits)));
  }
  expect_close(full_tensor(logits.grad()), expected_logits.grad(), kDoubleTolerance);
}

}  // namespace

TEST_CASE("cross-entropy over cut classes equals that of one process", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& test : loss_cases()) {
      INFO(test.name << ", " << ranks << " ranks");
      CHECK_NOTHROW(run_ranks(ranks, [&](int) { check_loss(test, init_device_mesh(at::kCPU, {ranks}, {"tp"})); }));
    }
  }
}

TEST_CASE("what a mean cross-entropy sends", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    auto logits = distribute_tensor(make_input(1, {6, 1000}), mesh, {Shard(1)}).set_requires_grad(true);
    const auto labels = at::randint(1000, {6}, make_generator(2), at::kLong);
    const LossParallel scope;
    at::Tensor loss;
    {
      CommDebugMode mode;
      loss = at::cross_entropy_loss(logits, labels);
      expect_equal(to_string(placements(loss)), "(Partial(Sum))");
      expect_equal(mode.calls(Collective::AllReduce), 2);  // maxima and sums, 6 doubles each
      expect_equal(mode.calls(), 2);
      expect_equal(mode.bytes_sent(), 2 * 6 * 8);
    }
    CommDebugMode mode;
    loss.backward();
    expect_equal(mode.calls(Collective::AllReduce), 1);
    expect_equal(mode.calls(), 1);
    expect_equal(mode.bytes_sent(), 6 * 8);
  });
}

TEST_CASE("batch and classes cut by two axes", "[parallel]") {
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum}) {
    run_ranks(4, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
      const LossCase test{.name = "", .sizes = {5, 7}, .reduction = reduction, .ignore_index = 3};
      auto expected_logits = make_input(1, test.sizes).set_requires_grad(true);
      const auto expected = test(expected_logits, test.target());
      expected.backward();
      auto logits = distribute_tensor(make_input(1, test.sizes), mesh, {Shard(0), Shard(1)}).set_requires_grad(true);
      const auto loss = test(logits, distribute_tensor(test.target(), mesh, {Shard(0), Replicate()}));
      expect_close(full_tensor(loss).detach(), expected.detach(), kDoubleTolerance);
      loss.backward();
      expect_equal(to_string(placements(logits.grad())), "(Shard(0), Shard(1))");
      expect_close(full_tensor(logits.grad()), expected_logits.grad(), kDoubleTolerance);
    });
  }
}

TEST_CASE("extreme logits, bfloat16 and rows that are all ignored", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    const auto wide = make_input(1, {4, 7}) * 1e4;
    const auto cut = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Shard(1)}); };
    expect_close(full_tensor(cut(wide).log_softmax(1)), wide.log_softmax(1), kDoubleTolerance);
    expect_close(full_tensor(cut(wide).softmax(1)), wide.softmax(1), kDoubleTolerance);
    const auto half = make_input(1, {4, 7}).to(at::kBFloat16);
    expect_close(full_tensor(cut(half).log_softmax(1)), half.log_softmax(1), {.rtol = 1e-2, .atol = 1e-2});
    expect_equal(cut(half).softmax(1).scalar_type(), at::kBFloat16);
    const LossParallel scope;
    const auto ignored = at::ones({4}, at::kLong);
    TESSERA_EXPECT(
        full_tensor(at::cross_entropy_loss(cut(wide), ignored, {}, at::Reduction::Mean, 1)).isnan().item<bool>());
  });
}

TEST_CASE("a target that is no class is refused on every rank", "[parallel]") {
  for (const int64_t classes : {1, 5}) {
    run_ranks(3, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
      const auto logits = distribute_tensor(make_input(1, {4, classes}), mesh, {Shard(1)});
      const LossParallel scope;
      for (const int64_t target : {classes, int64_t{-1}}) {
        const auto text = error_text([&] { at::cross_entropy_loss(logits, at::ones({4}, at::kLong) * target); });
        TESSERA_EXPECT(text.find("out of bounds") != std::string::npos);
      }
    });
  }
}

TEST_CASE("the scope is one of losses alone", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto whole = make_input(1, {4, 5});
    const auto labels = at::ones({4}, at::kLong);
    const auto logits = distribute_tensor(whole, mesh, {Shard(1)});
    expect_throws<ValueError>([&] { at::cross_entropy_loss(logits, labels); }, "with a LossParallel scope");
    const LossParallel scope;
    expect_throws<ValueError>([&] { logits* whole; }, "DTensors and plain tensors are mixed");
    expect_throws<ValueError>([&] { at::cross_entropy_loss(whole, distribute_tensor(labels, mesh, {Replicate()})); },
                              "DTensors and plain tensors are mixed");
    expect_close(full_tensor(at::nll_loss(logits.log_softmax(1), labels)), at::nll_loss(whole.log_softmax(1), labels),
                 kDoubleTolerance);
    const c10::InferenceMode inference;
    expect_close(full_tensor(at::cross_entropy_loss(logits, labels)), at::cross_entropy_loss(whole, labels),
                 kDoubleTolerance);
  });
}

TEST_CASE("backward after the scope, also for plain targets that are trained", "[parallel]") {
  for (const bool weighted : {false, true}) {
    run_ranks(3, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
      const LossCase test{
          .name = "", .sizes = {6, 7}, .label_smoothing = 0.1, .weighted = weighted, .probabilities = true};
      const auto expected_logits = make_input(1, test.sizes).set_requires_grad(true);
      const auto expected_target = test.target().set_requires_grad(true);
      test(expected_logits, expected_target).backward();
      const auto logits = distribute_tensor(make_input(1, test.sizes), mesh, {Shard(1)}).set_requires_grad(true);
      const auto target = test.target().set_requires_grad(true);
      at::Tensor loss;
      {
        const LossParallel scope;
        loss = test(logits, target);
      }
      loss.backward();
      expect_close(full_tensor(logits.grad()), expected_logits.grad(), kDoubleTolerance);
      TESSERA_EXPECT(!is_dtensor(target.grad()));
      expect_close(target.grad(), expected_target.grad(), kDoubleTolerance);
    });
  }
}

TEST_CASE("without the scope a plain target is an error, and a DTensor is not", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto logits = distribute_tensor(make_input(1, {4, 5}), mesh, {Shard(1)});
    const auto labels = at::ones({4}, at::kLong);
    expect_throws<ValueError>([&] { at::cross_entropy_loss(logits, labels); }, "nll_loss");
    const auto loss = at::cross_entropy_loss(logits, distribute_tensor(labels, mesh, {Replicate()}));
    expect_close(full_tensor(loss), at::cross_entropy_loss(make_input(1, {4, 5}), labels), kDoubleTolerance);
  });
}

}  // namespace tessera::testing
