// Calls that one device refuses are refused on every rank, also on one whose kernel would see nothing of it.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmv.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/full.h>
#include <ATen/ops/grid_sampler_2d.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/logcumsumexp.h>
#include <ATen/ops/max.h>
#include <ATen/ops/median.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/nll_loss2d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/reflection_pad2d.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/soft_margin_loss.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string_view>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

thread_local int ones_made = 0;

/// How often `call` calls at::ones.
int ones_of(const std::function<void()>& call) {
  const auto count = [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
    ones_made += op.name() == std::string_view("aten::ones") ? 1 : 0;
    return nullptr;
  };
  ones_made = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  call();
  at::removeCallback(handle);
  return ones_made;
}

}  // namespace

TEST_CASE("sizes that do not fit together", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto cut = [&](std::vector<int64_t> sizes) { return distribute_tensor(at::ones(sizes), mesh, {Shard(0)}); };
    const auto whole = [&](std::vector<int64_t> sizes) {
      return distribute_tensor(at::ones(sizes), mesh, {Replicate()});
    };
    expect_throws<ValueError>([&] { at::dot(cut({4}), cut({3})); }, "two vectors of one length are needed");
    // Of one item the second rank has nothing.
    expect_throws<ValueError>([&] { at::conv2d(cut({1, 4, 5, 5}), whole({2, 3, 3, 3})); }, "the input 3 channels");
    expect_throws<ValueError>(
        [&] {
          at::conv2d(cut({1, 3, 5, 5}), whole({2, 3, 3, 3}), whole({3}));
        },
        "it needs 2 elements");
    expect_throws<ValueError>([&] { at::conv2d(cut({1, 3, 2, 2}), whole({2, 3, 3, 3})); }, "does not fit into input");
    expect_throws<ValueError>([&] { at::layer_norm(cut({1, 4}), {3}); }, "normalized_shape [3] of Float[1, 4]");
    expect_throws<ValueError>([&] { at::layer_norm(cut({1, 4}), {4}, whole({3})); }, "Float[3] as weight or bias");
    const auto targets = distribute_tensor(at::zeros({3, 2, 2}, at::kLong), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::nll_loss2d(cut({4, 3, 2, 2}), targets); }, "target Long[3, 2, 2]");
    expect_throws<ValueError>([&] { at::adaptive_avg_pool2d(cut({1}), {2, 2}); }, "an output size of 2 dims");
  });
}

TEST_CASE("sizes that do not fit together, of which local ones do", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto cut = [&](std::vector<int64_t> sizes) { return distribute_tensor(at::ones(sizes), mesh, {Shard(0)}); };
    const auto whole = [&](std::vector<int64_t> sizes) {
      return distribute_tensor(at::ones(sizes), mesh, {Replicate()});
    };
    expect_throws<ValueError>([&] { at::binary_cross_entropy(cut({2, 1}), cut({2})); }, "they need the same sizes");
    expect_throws<ValueError>(
        [&] {
          at::binary_cross_entropy(cut({4, 3}), cut({4, 3}), whole({2, 3}));
        },
        "weight Float[2, 3] does not broadcast to Float[4, 3]");
    const auto of_logits = [](const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight = {},
                              const at::Tensor& pos_weight = {}) {
      at::binary_cross_entropy_with_logits(x, y, weight, pos_weight);
    };
    expect_throws<ValueError>([&] { of_logits(cut({4, 3}), cut({4, 3}), whole({2, 3})); }, "weight Float[2, 3]");
    expect_throws<ValueError>(
        [&] {
          of_logits(cut({4, 3}), cut({4, 3}), {}, whole({2, 3}));
        },
        "pos_weight Float[2, 3]");
    expect_throws<ValueError>([&] { of_logits(cut({3, 3}), whole({1, 3})); }, "input Float[3, 3] does not broadcast");
    of_logits(whole({3}), cut({3, 3}), whole({3, 1}));
    expect_throws<ValueError>([&] { at::soft_margin_loss(whole({1, 3}), cut({3, 3})); }, "target Float[3, 3]");
    // A shard of [4, 4] has as many rows as the values; of [3, 4] one of both has.
    const auto columns = distribute_tensor(at::zeros({2}, at::kLong), mesh, {Replicate()});
    const c10::List<std::optional<at::Tensor>> at{std::nullopt, columns};
    for (const int64_t rows : {4, 3}) {
      expect_throws<ValueError>([&] { cut({rows, 4}).index_put(at, whole({2, 2})); }, "values Float[2, 2]");
      expect_throws<ValueError>([&] { cut({rows, 4}).index_put_(at, whole({2, 2})); }, "the sizes of what is indexed");
      expect_throws<ValueError>([&] { cut({rows, 4}).index_put(at, whole({1, rows, 2})); }, "do not broadcast to [");
      cut({rows, 4}).index_put_(at, whole({rows, 1}));
    }
    expect_throws<ValueError>(
        [&] {
          at::grid_sampler_2d(cut({1, 2, 3, 3}), cut({2, 3, 3, 2}), 0, 0, false);
        },
        "they need one dtype and as many items");
    expect_throws<ValueError>([&] { at::reflection_pad2d(cut({3, 2, 2, 2}), {-1, -1, 0, 0}); }, "enough for a window");
  });
}

TEST_CASE("numbers and dtypes that only the first rank's kernel reads", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto cut = [&](std::vector<int64_t> sizes, int64_t dim, at::ScalarType dtype = at::kFloat) {
      return distribute_tensor(at::ones(sizes, dtype), mesh, {Shard(dim)});
    };
    const auto whole = [&](std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
      return distribute_tensor(at::ones(sizes, dtype), mesh, {Replicate()});
    };
    // The contracted dim is cut: the first rank adds the summand.
    expect_throws<std::runtime_error>([&] { at::addmm(whole({2}), cut({2, 4}, 1), cut({4, 2}, 0), 1e39); }, "overflow");
    expect_throws<std::runtime_error>(
        [&] {
          at::addmv(whole({2}, at::kChar), cut({2, 4}, 1, at::kChar), cut({4}, 0, at::kChar), 300);
        },
        "overflow");
    expect_close(full_tensor(at::addmm(whole({2}), cut({2, 4}, 1), cut({4, 2}, 0), 3)), at::full({2, 2}, 7.f));
    const auto pending = from_local(at::ones({3}, at::kHalf), mesh, {Partial()});
    expect_throws<std::runtime_error>([&] { pending.clone().add_(whole({3}, at::kHalf), 1e5); }, "overflow");
    expect_throws<ValueError>(
        [&] {
          at::convolution(cut({1, 2, 3, 3}, 1), cut({2, 2, 1, 1}, 1), whole({2}, at::kDouble), {1, 1}, {0, 0}, {1, 1},
                          /*transposed=*/false, {0, 0}, /*groups=*/1);
        },
        "in the dtype of input");
  });
}

TEST_CASE("no kernel is asked about numbers that every kernel takes", "[dtensor][ops]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto cut = [&](std::vector<int64_t> sizes, int64_t dim, at::ScalarType dtype = at::kFloat) {
      return distribute_tensor(at::ones(sizes, dtype), mesh, {Shard(dim)});
    };
    const auto a = cut({2, 4}, 1), b = cut({4, 2}, 0);
    const auto longs = cut({2, 4}, 1, at::kLong), more_longs = cut({4, 2}, 0, at::kLong);
    const auto bias = distribute_tensor(at::ones({2}), mesh, {Replicate()}), long_bias = bias.to(at::kLong);
    const auto pending = from_local(at::ones({2}), mesh, {Partial()});
    const auto count = [&](const std::function<void()>& call) {
      call();  // which plans
      return ones_of(call);
    };
    for (const at::Scalar& number : {at::Scalar(1), at::Scalar(0), at::Scalar(-0.25), at::Scalar(1000)}) {
      expect_equal(count([&] { pending.add_(bias, number); }), 0);
      expect_equal(count([&] { pending.sub_(number); }), 0);
      expect_equal(count([&] { at::addmm(bias, a, b, number); }), 0);
    }
    expect_equal(count([&] { at::addmm(long_bias, longs, more_longs, 3); }), 0);
    const int asked = rank == 0 ? 0 : 1;
    expect_equal(count([&] { pending.add_(bias, 1e10); }), 2 * asked);
    expect_equal(count([&] { pending.sub_(2, 1e10); }), asked);
    expect_equal(count([&] { at::addmm(bias, a, b, 1e10); }), 3 * asked);
    expect_equal(count([&] { at::addmm(long_bias, longs, more_longs, 1.0); }), 3 * asked);
  });
}

TEST_CASE("what kernels refuse where the last rank has no elements", "[dtensor][ops]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto cut = [&](at::ScalarType dtype) {
      return distribute_tensor(at::ones({3, 4, 2}, dtype), mesh, {Shard(0)});
    };
    const auto whole = [&](std::vector<int64_t> sizes) {
      return distribute_tensor(at::ones(sizes), mesh, {Replicate()});
    };
    // Twice each: the second call finds the plan in the cache.
    for (int call = 0; call < 2; ++call) {
      const auto longs = cut(at::kLong), floats = cut(at::kFloat);
      expect_throws<c10::Error>([&] { at::logcumsumexp(longs, 1); }, "not implemented for 'Long'");
      expect_throws<c10::Error>([&] { at::layer_norm(longs, {2}); }, "not implemented for 'Long'");
      expect_throws<c10::Error>([&] { at::group_norm(longs, 2); }, "not implemented for 'Long'");
      expect_throws<c10::Error>([&] { at::median(cut(at::kBool), 1); }, "not implemented for 'Bool'");
      expect_throws<c10::Error>([&] { at::max(cut(at::kComplexFloat)); }, "not implemented for 'ComplexFloat'");
      expect_throws<c10::Error>([&] { at::index_fill(floats, 1, whole({2}), 2); }, "dtype int64 for index");
      expect_throws<c10::Error>(
          [&] {
            at::conv_transpose1d(floats, whole({4, 3, 2}), {}, /*stride=*/1, /*padding=*/0, /*output_padding=*/1);
          },
          "output padding");
    }
    const auto halves = cut(at::kBFloat16), statistics = halves.select(2, 0).unsqueeze(2);
    expect_throws<c10::Error>(
        [&] {
          at::native_layer_norm_backward(halves, halves, {2}, statistics, statistics, {}, whole({2}),
                                         std::array<bool, 3>{true, false, true});
        },
        "expected scalar type");
    const auto one_sample = distribute_tensor(at::ones({1, 2}, at::kDouble), mesh, {Shard(0)});
    const auto target = distribute_tensor(at::zeros({1}, at::kLong), mesh, {Replicate()});
    expect_throws<ValueError>([&] { at::nll_loss(one_sample, target, whole({2})); }, "they need one floating dtype");
    // An op that kernels take is asked for with zeros, which no value of an operand may make an error.
    expect_equal(full_tensor(at::logcumsumexp(cut(at::kFloat), 1)).size(0), 3);
  });
}

TEST_CASE("arguments that no kernel takes", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({1, 3}), mesh, {Shard(0)});
    const auto one = distribute_tensor(at::ones({1}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::embedding(x, one); }, "indices of Long or Int");
    expect_throws<ValueError>([&] { at::index_select(x, 1, one); }, "a vector of Long or Int");
    expect_throws<ValueError>([&] { at::flip(x, {1, -1}); }, "dim 1 is there twice");
    expect_throws<ValueError>([&] { at::roll(x, {1, 2}, {1}); }, "2 shifts for 1 dims");
  });
}

TEST_CASE("an error of libtorch about DTensors names the op, the operands and a remedy", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto a = distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)});
    const auto b = distribute_tensor(at::ones({4, 2}), mesh, {Replicate()});
    for (int again = 0; again < 2; ++again) {
      const auto multiply = [&] { a.mm(b); };
      expect_throws<c10::Error>(multiply, "aten::mm of DTensors: ");
      expect_throws<c10::Error>(multiply, "Shard(0)");
      expect_throws<c10::Error>(multiply, "ReplicateAndRun");
    }
    // Of a kernel, where the plan is known.
    const auto table = distribute_tensor(at::ones({2, 2}), mesh, {Replicate()});
    const auto right = distribute_tensor(at::zeros({2}, at::kLong), mesh, {Replicate()});
    at::embedding(table, right);
    expect_throws<std::exception>([&] { at::embedding(table, right + 7); }, "aten::embedding of DTensors: ");
  });
}

TEST_CASE("an error of a kernel that is none of libtorch's names the op, the operands and a remedy", "[dtensor][ops]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto x = distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)});
      const auto y = distribute_tensor(at::ones({3}), mesh, {Replicate()});
      at::add(x, y);  // so that the plan is known where ops run unboxed
      for (int again = 0; again < 2; ++again) {
        const auto add = [&] { at::add(x, y, 1e39); };
        expect_throws<ValueError>(add, "overflow (aten::add.Tensor of DTensors: Float[5, 3] ");
        expect_throws<ValueError>(add, "Shard(0)");
        expect_throws<ValueError>(add, "ReplicateAndRun");
        const auto add_in_place = [&] { x.add_(y, 1e39); };
        expect_throws<ValueError>(add_in_place, "overflow (aten::add_.Tensor of DTensors: Float[5, 3] ");
      }
    });
  }
}

}  // namespace tessera
