#include "nn/hooks/hook_point.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <catch2/catch.hpp>

#include "base/error.h"
#include "nn/linear.h"

namespace {

using tessera::HookHandle;
using tessera::HookOrder;
using tessera::HookPoint;
using tessera::TensorRefs;

// Adds one; calls itself `depth` more times; throws at depth 13.
struct StepImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x, int64_t depth);
};

TESSERA_MODULE_IMPL(Step, StepImpl);

at::Tensor StepImpl::forward(at::Tensor x, int64_t depth) {
  if (depth == 13) throw std::runtime_error("step 13");
  at::Tensor y = x + 1;
  return depth > 0 ? dynamic_cast<Step::Impl&>(*this).forward(y, depth - 1) : y;
}

at::Tensor number(double value) {
  return at::full({}, value);
}

using Log = std::vector<std::string>;

tessera::ForwardHook note(Log& log, std::string text) {
  return [&log, text](HookPoint&, TensorRefs) { log.push_back(text); };
}

TEST_CASE("hooks run in order around forward, also when the module calls itself", "[nn]") {
  Step step;
  Log log;
  step->register_forward_pre_hook(note(log, "pre 1"));
  step->register_forward_pre_hook(note(log, "pre 2"));
  step->register_forward_pre_hook(note(log, "pre 0"), HookOrder::Prepend);
  step->register_forward_hook(note(log, "post 1"));
  step->register_forward_hook(note(log, "post 0"), HookOrder::Prepend);
  step->register_exception_hook([&](HookPoint&) { log.push_back("exception"); });
  CHECK(step(number(1), 0).item<double>() == 2);
  CHECK(log == Log{"pre 0", "pre 1", "pre 2", "post 0", "post 1"});

  log.clear();
  CHECK(step(number(1), 1).item<double>() == 3);
  CHECK(log == Log{"pre 0", "pre 1", "pre 2", "pre 0", "pre 1", "pre 2", "post 0", "post 1", "post 0", "post 1"});
}

TEST_CASE("hooks get the module and replace inputs and outputs, not the caller's tensors", "[nn]") {
  Step step;
  step->register_forward_pre_hook([&](HookPoint& point, TensorRefs inputs) {
    CHECK(&point.module() == step.get());
    CHECK(point.type_name().find("StepImpl") != std::string::npos);
    REQUIRE(inputs.size() == 1);
    *inputs[0] = *inputs[0] * 10;
  });
  step->register_forward_hook([](HookPoint&, TensorRefs outputs) {
    REQUIRE(outputs.size() == 1);
    *outputs[0] = -*outputs[0];
  });
  at::Tensor mine = number(2);
  CHECK(step(mine, 0).item<double>() == -21);
  CHECK(mine.item<double>() == 2);
}

TEST_CASE("a handle removes its hook once, and outlives the module", "[nn]") {
  HookHandle outliving;
  {
    Step step;
    Log log;
    HookHandle first = step->register_forward_pre_hook(note(log, "first"));
    outliving = step->register_forward_pre_hook(note(log, "second"));
    first.remove();
    first.remove();
    step(number(0), 0);
    CHECK(log == Log{"second"});
    {
      const tessera::ScopedHook scoped(step->register_forward_hook(note(log, "scoped")));
      step(number(0), 0);
    }
    step(number(0), 0);
    CHECK(log == Log{"second", "second", "scoped", "second"});
  }
  outliving.remove();
  CHECK_FALSE(Step()->has_hooks());
}

TEST_CASE("hooks may remove and add hooks while they run", "[nn]") {
  Step step;
  Log log;
  HookHandle self, later;
  self = step->register_forward_pre_hook([&](HookPoint& point, TensorRefs) {
    log.push_back("once");
    self.remove();
    later.remove();
    point.register_forward_pre_hook(note(log, "added"));
  });
  later = step->register_forward_pre_hook(note(log, "removed before its turn"));
  step(number(0), 0);
  CHECK(log == Log{"once"});
  step(number(0), 0);
  CHECK(log == Log{"once", "added"});
}

TEST_CASE("exception hooks run in reverse order when forward or a hook throws", "[nn]") {
  Step step;
  Log log;
  step->register_forward_pre_hook(note(log, "pre"));
  step->register_forward_hook(note(log, "post"));
  step->register_exception_hook([&](HookPoint&) { log.push_back("cleanup 1"); });
  step->register_exception_hook([](HookPoint&) { throw std::runtime_error("only a warning"); });
  step->register_exception_hook([&](HookPoint&) { log.push_back("cleanup 2"); });
  CHECK_THROWS_WITH(step(number(0), 13), "step 13");
  CHECK(log == Log{"pre", "cleanup 2", "cleanup 1"});

  log.clear();
  HookHandle failing =
      step->register_forward_hook([](HookPoint&, TensorRefs) { throw std::runtime_error("post failed"); });
  CHECK_THROWS_WITH(step(number(0), 0), "post failed");
  CHECK(log == Log{"pre", "post", "cleanup 2", "cleanup 1"});
  failing.remove();
  log.clear();
  step(number(0), 0);
  CHECK(log == Log{"pre", "post"});
}

TEST_CASE("state is attached by type", "[nn]") {
  struct Sharding {
    int units;
  };
  struct Style {};
  Step step;
  CHECK(step->find<Sharding>() == nullptr);
  step->attach(std::make_shared<Sharding>(Sharding{3}));
  CHECK(step->find<Sharding>()->units == 3);
  CHECK(step->find<Style>() == nullptr);
  CHECK_FALSE(step->has_hooks());
  CHECK_THROWS_AS(step->attach(std::make_shared<Sharding>()), tessera::StateError);
  CHECK(step->detach<Sharding>()->units == 3);
  CHECK(step->detach<Sharding>() == nullptr);
  CHECK(step->find<Sharding>() == nullptr);
}

TEST_CASE("a module without a hook point gives an error with the remedies", "[nn]") {
  tessera::nn::Linear ours(2, 2);
  torch::nn::Module& found = *ours;
  CHECK(&tessera::hook_point(found, "test") == tessera::find_hook_point(*ours));

  torch::nn::Linear stock(2, 2);
  CHECK(tessera::find_hook_point(*stock) == nullptr);
  CHECK_THROWS_AS(tessera::hook_point(*stock, "fully_shard"), tessera::StateError);
  CHECK_THROWS_WITH(
      tessera::hook_point(*stock, "fully_shard"),
      "fully_shard: modules of type torch::nn::LinearImpl have no hook point, so nothing can run before and after "
      "their forward. Declare the type's holder with TESSERA_MODULE(Name) in place of TORCH_MODULE(Name), use "
      "tessera::nn::* in place of torch::nn::*, or wrap the module with tessera::hooked(module). A layer that a module "
      "of libtorch made and calls by itself, as the linear ones of TransformerEncoderLayer, takes none of these: give "
      "that module");
  CHECK_THROWS_AS(ours->register_forward_hook(nullptr), tessera::ValueError);

  // Which hooked() cannot wrap.
  torch::nn::Sequential sequential(torch::nn::Linear(2, 2));
  CHECK_THROWS_WITH(
      tessera::hook_point(*sequential, "fully_shard"),
      "fully_shard: modules of type torch::nn::SequentialImpl have no hook point, so nothing can run before and after "
      "their forward. Use tessera::nn::Sequential, or give the elements instead");
  CHECK_THROWS_WITH(
      tessera::hook_point(*torch::nn::ModuleList(), "fully_shard"),
      "fully_shard: modules of type torch::nn::ModuleListImpl have no hook point, so nothing can run before and after "
      "their forward. Give the elements instead, or the module that holds the container");
}

}  // namespace
