// Selective checkpointing: ops whose results are kept run once, and the gradients stay the same.

#include "activation_checkpoint/saved_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/activation_checkpoint/leaf.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

int counted_calls = 0;

at::Tensor counted_sin(const at::Tensor& x) {
  ++counted_calls;
  return x.sin();
}

at::Tensor counted(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_saved_ops_test::counted", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

}  // namespace

TORCH_LIBRARY(tessera_saved_ops_test, library) {
  library.def("counted(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera_saved_ops_test, CPU, library) {
  library.impl("counted", &counted_sin);
}

TEST_CASE("the result of attention is saved if nothing is dropped") {
  const CheckpointOptions options{.ops_to_save = {{"aten::_scaled_dot_product_flash_attention_for_cpu"}}};
  const auto attend = [](const at::Tensor& y) {
    const auto heads = y.sin().view({1, 2, 8, 4});
    return at::scaled_dot_product_attention(heads, heads, heads, {}, 0.0, /*is_causal=*/true).cos();
  };
  const auto x = leaf(1, {64}), expected = leaf(1, {64});
  checkpoint(options, attend, x).sum().backward();
  attend(expected).sum().backward();
  expect_bit_equal(x.grad(), expected.grad());
}

TEST_CASE("an op whose result is saved runs once, any other one twice") {
  const auto x = leaf(1, {4}), x2 = leaf(1, {4});
  const auto function = [](const at::Tensor& y) { return (y * counted(y.detach())).tanh(); };
  for (const bool saved : {false, true}) {
    counted_calls = 0;
    x.mutable_grad().reset();
    checkpoint({.ops_to_save = saved ? OpList({"tessera_saved_ops_test::counted"}) : OpList()}, function, x)
        .sum()
        .backward();
    CHECK(counted_calls == (saved ? 1 : 2));
    x2.mutable_grad().reset();
    function(x2).sum().backward();
    expect_bit_equal(x.grad(), x2.grad());
  }
}

TEST_CASE("gradients through saved products are those of the plain call, also of a graph that is kept") {
  const auto run = [](bool checkpointed) {
    const auto x = leaf(1, {3, 4}), w = leaf(2, {4, 4}), b = leaf(3, {4});
    const auto function = [&](const at::Tensor& y) {
      auto hidden = at::addmm(b, y.tanh(), w).sigmoid();
      return hidden.mm(w).exp() + at::addmm(b, hidden, w);
    };
    const CheckpointOptions options{.ops_to_save = {{"aten::mm", "aten::addmm"}}};
    const auto out = checkpointed ? checkpoint(options, function, x) : function(x);
    out.sum().backward({}, /*retain_graph=*/true);
    out.sum().backward();
    return std::vector{out.detach(), x.grad(), w.grad(), b.grad()};
  };
  const auto plain = run(false), kept = run(true);
  for (size_t i = 0; i < plain.size(); ++i) {
    expect_bit_equal(kept[i], plain[i]);
  }
}

TEST_CASE("saved ops of DTensors are those of the whole tensor, not of the parts") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {world_size}, {"tp"});
    const auto run = [&](bool checkpointed) {
      const auto x = distribute_tensor(leaf(1, {3, 5}), mesh, {Replicate()});
      const auto w = distribute_tensor(leaf(2, {5, 7}), mesh, {Shard(1)});
      const auto function = [&](const at::Tensor& y) { return y.mm(w).tanh().mm(w.t()).sin(); };
      const auto out = checkpointed ? checkpoint({.ops_to_save = {{"aten::mm"}}}, function, x) : function(x);
      out.sum().backward();
      return std::vector{full_tensor(out.detach()), full_tensor(x.grad()), full_tensor(w.grad())};
    };
    const auto plain = run(false), kept = run(true);
    for (size_t i = 0; i < plain.size(); ++i) {
      expect_bit_equal(kept[i], plain[i]);
    }
  });
}

TEST_CASE("a saved result that is changed in place is an error that names the op") {
  const auto x = leaf(1, {3, 3});
  const auto out = checkpoint(
      {.ops_to_save = {{"aten::mm"}}}, [](const at::Tensor& y) { return y.mm(y).relu_().sin(); }, x);
  expect_throws<StateError>([&] { out.sum().backward(); },
                            "checkpoint: the result of aten::mm is among those to be saved, but was changed in place");
}

TEST_CASE("a second forward that calls other ops is an error") {
  int calls = 0;
  const auto x = leaf(1, {3, 3});
  const auto function = [&](const at::Tensor& y) { return (++calls == 1 ? y.mm(y) : at::addmm(y, y, y)).sin(); };
  const auto out = checkpoint({.ops_to_save = {{"aten::mm", "aten::addmm"}}}, function, x);
  expect_throws<StateError>([&] { out.sum().backward(); }, "it calls aten::addmm where it called aten::mm");
}

TEST_CASE("ops that cannot be saved are refused by name") {
  expect_throws<KeyError>([] { OpList({"aten::no_such_op"}); }, "OpList: libtorch has no op 'aten::no_such_op'");
  expect_throws<ValueError>([] { OpList({"aten::linear"}); }, "OpList: aten::linear consists of other ops");
  expect_throws<ValueError>([] { OpList({"aten::add_"}); }, "OpList: aten::add_ writes or returns its arguments");
  expect_throws<ValueError>([] { OpList({"aten::view"}); }, "OpList: aten::view writes or returns its arguments");
  expect_throws<ValueError>([] { OpList({"aten::native_dropout"}); },
                            "OpList: aten::native_dropout draws random numbers");
}

}  // namespace tessera
