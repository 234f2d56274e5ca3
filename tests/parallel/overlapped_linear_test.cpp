#include "parallel/overlapped_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "debug/comm_debug_mode.h"
#include "nn/modules.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int64_t kIn = 7;

nn::Linear make_layer(int64_t out, bool bias = true) {
  nn::Linear linear(torch::nn::LinearOptions(kIn, out).bias(bias));
  fill_in_double(*linear, 3);
  return linear;
}

at::Tensor cut(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim) {
  return redistribute(from_local(tensor, mesh, {Replicate()}), {Shard(dim)});
}

ColwiseParallel column_wise(int64_t dim, bool overlap, bool use_local_output = false) {
  return ColwiseParallel({.input_layouts = Shard(dim), .use_local_output = use_local_output, .overlap = overlap});
}

/// What a layer computes on one input, cut along `dim`, and what its gradients are; all whole, undefined if there is
/// none. `entries` are its collectives.
struct Run {
  at::Tensor output, input_grad, weight_grad, bias_grad;
  std::string product;  // the autograd node of the output
  std::map<CommDebugMode::Key, CommStats::Entry> forward_entries, backward_entries;
};

struct RunOptions {
  int64_t dim = 1;
  bool overlap = true;
  bool bias = true;
  bool input_needs_grad = true;
  bool weight_needs_grad = true;
  at::ScalarType dtype = at::kFloat;
  bool autocast = false;
};

void set_autocast(bool enabled) {
  at::autocast::set_autocast_enabled(at::kCPU, enabled);
  at::autocast::clear_cache();
}

Run run_layer(const DeviceMesh& mesh, const at::Tensor& input, const RunOptions& options) {
  auto layer = make_layer(9, options.bias);
  layer->to(options.dtype);
  layer->weight.set_requires_grad(options.weight_needs_grad);
  parallelize_module(layer, mesh, column_wise(options.dim, options.overlap));
  const auto whole_input = input.to(options.dtype).set_requires_grad(options.input_needs_grad);
  const auto part = cut(whole_input, mesh, options.dim);
  Run run;
  at::Tensor output;
  {
    CommDebugMode mode(*layer);
    set_autocast(options.autocast);
    output = layer(part);
    set_autocast(false);
    run.forward_entries = mode.entries();
  }
  run.output = full_tensor(output.detach());
  if (output.requires_grad()) {
    run.product = output.grad_fn()->name();
    const auto local = to_local(output);
    const auto loss = (local * local).sum();  // this rank's term
    CommDebugMode mode(*layer);
    loss.backward();
    run.backward_entries = mode.entries();
  }
  run.input_grad = whole_input.grad();
  run.weight_grad = whole(layer->weight.grad());
  run.bias_grad = options.bias ? whole(layer->bias.grad()) : at::Tensor();
  return run;
}

int64_t calls(const std::map<CommDebugMode::Key, CommStats::Entry>& entries) {
  int64_t result = 0;
  for (const auto& [key, entry] : entries) {
    result += entry.calls;
  }
  return result;
}

void expect_alike(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  expect_equal(actual.defined(), expected.defined());
  if (expected.defined()) {
    expect_equal(actual.scalar_type(), expected.scalar_type());
    expect_close(actual, expected, tolerance);
  }
}

/// With overlap as without it.
void compare_runs(const DeviceMesh& mesh, const at::Tensor& input, RunOptions options, Tolerance tolerance) {
  options.overlap = true;
  const auto with = run_layer(mesh, input, options);
  options.overlap = false;
  const auto without = run_layer(mesh, input, options);
  expect_alike(with.output, without.output, tolerance);
  expect_alike(with.input_grad, without.input_grad, tolerance);
  expect_alike(with.weight_grad, without.weight_grad, tolerance);
  expect_alike(with.bias_grad, without.bias_grad, tolerance);
  expect_equal(calls(with.forward_entries), calls(without.forward_entries));
  expect_equal(calls(with.backward_entries), calls(without.backward_entries));
}

}  // namespace

TEST_CASE("overlapped column-wise layers equal plain ones", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      struct Case {
        std::vector<int64_t> sizes;
        int64_t dim;
      };
      for (const auto& [sizes, dim] : {Case{{5, kIn}, 0}, Case{{1, 8, kIn}, 1}, Case{{2, 5, kIn}, 1},
                                       Case{{3, 1, kIn}, 1}, Case{{3, 2, kIn}, 0}, Case{{2, 2, 3, kIn}, 2}}) {
        for (const bool bias : {true, false}) {
          for (const int64_t out : {1, 17}) {
            auto reference = make_layer(out, bias), plain = make_layer(out, bias), distributed = make_layer(out, bias);
            auto whole_sizes = sizes;
            whole_sizes.back() = out;
            parallelize_module(plain, mesh, column_wise(dim, true, /*use_local_output=*/true));
            parallelize_module(distributed, mesh, column_wise(dim, true));
            const auto last = static_cast<int64_t>(sizes.size()) - 1;
            const auto compare = [&](nn::Linear& layer, const Forward& run) {
              train_and_compare({.reference = *reference,
                                 .sharded = *layer,
                                 .run_reference = [&](const at::Tensor& x) { return reference(x); },
                                 .run_sharded = run},
                                make_input(1, sizes));
            };
            compare(plain, [&](const at::Tensor& x) {
              const auto y = plain(to_local(cut(x, mesh, dim)));
              return full_tensor(from_local(y, mesh, {Shard(last)}, {.shape = whole_sizes}));
            });
            reference = make_layer(out, bias);
            compare(distributed, [&](const at::Tensor& x) { return whole(distributed(cut(x, mesh, dim))); });
          }
        }
      }
    });
  }
}

TEST_CASE("overlap changes neither results nor collectives", "[parallel]") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      const auto input = make_input(1, {2, 8, kIn}), matrix = make_input(2, {8, kIn});
      const Tolerance rounding{.rtol = 1e-5, .atol = 1e-6}, coarse{.rtol = 2e-2, .atol = 2e-2};
      compare_runs(mesh, input, {}, rounding);
      compare_runs(mesh, matrix, {.dim = 0}, rounding);
      compare_runs(mesh, input, {.bias = false}, rounding);
      compare_runs(mesh, input, {.input_needs_grad = false}, rounding);
      compare_runs(mesh, input, {.weight_needs_grad = false}, rounding);
      compare_runs(mesh, matrix, {.dim = 0, .input_needs_grad = false, .weight_needs_grad = false}, rounding);
      compare_runs(mesh, input, {.dtype = at::kBFloat16}, coarse);
      compare_runs(mesh, matrix, {.dim = 0, .autocast = true}, coarse);
      compare_runs(mesh, input, {.bias = false, .autocast = true}, coarse);
      {
        const c10::InferenceMode inference;
        compare_runs(mesh, input, {.input_needs_grad = false, .weight_needs_grad = false}, rounding);
      }
      const at::NoGradGuard no_grad;
      compare_runs(mesh, input, {}, rounding);
    });
  }
}

TEST_CASE("an overlapped layer gathers once and scatters once", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    const auto run = run_layer(mesh, make_input(1, {2, 8, kIn}), {.bias = false});
    TESSERA_EXPECT(run.product.find("OverlappedLinear") != std::string::npos);
    // 8 positions over 3 ranks: each sends its 3, or padding, of 2 x 7 floats to 2 ranks.
    static constexpr int64_t kBytes = 2 * 3 * 2 * kIn * 4;
    const auto expect_one = [](const auto& entries, Collective kind) {
      CommStats::Entry found;
      for (const auto& [key, entry] : entries) {
        if (key.collective == kind) {
          found.calls += entry.calls;
          found.bytes_sent += entry.bytes_sent;
        }
      }
      expect_equal(found.calls, 1);
      expect_equal(found.bytes_sent, kBytes);
    };
    expect_one(run.forward_entries, Collective::AllGather);
    expect_equal(calls(run.forward_entries), 1);
    expect_one(run.backward_entries, Collective::ReduceScatter);
    expect_equal(calls(run.backward_entries), 2);  // the other one is that of cut()
    TESSERA_EXPECT(run_layer(mesh, make_input(1, {2, 8, kIn}), {.overlap = false, .bias = false})
                       .product.find("OverlappedLinear") == std::string::npos);
    // Autocast casts before the gather: half of the bytes.
    const auto cast = run_layer(mesh, make_input(1, {2, 8, kIn}), {.bias = false, .autocast = true});
    expect_equal(cast.forward_entries.begin()->second.bytes_sent, kBytes / 2);
  });
}

TEST_CASE("inputs of an overlapped layer that are not shards of positions", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(2)), Placement(Partial())}) {
      auto reference = make_layer(9), layer = make_layer(9);
      parallelize_module(layer, mesh, ColwiseParallel({.output_layouts = Replicate(), .overlap = true}));
      train_and_compare({.reference = *reference,
                         .sharded = *layer,
                         .run_reference = [&](const at::Tensor& x) { return reference(x); },
                         .run_sharded =
                             [&](const at::Tensor& x) {
                               return layer(redistribute(from_local(x, mesh, {Replicate()}), {placement}));
                             }},
                        make_input(1, {2, 5, kIn}));
    }
  });
}

TEST_CASE("with overlap as without, a copied view is not read once the viewed tensor was written", "[parallel]") {
  const bool overlap = GENERATE(false, true);
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    auto layer = make_layer(9);
    parallelize_module(layer, mesh, column_wise(1, overlap));
    const auto viewed = distribute_tensor(make_input(1, {4, 9, kIn}), mesh, {Shard(1)});
    const auto view = viewed.slice(1, 0, 8);  // shards of 4 rather than 5 and 4: a copy
    layer(view);
    {
      const at::NoGradGuard no_grad;
      viewed.add_(1);
    }
    expect_throws<StateError>([&] { layer(view); }, "was written since");
  });
}

TEST_CASE("what overlap refuses", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::Sequential model(nn::Embedding(5, 6), nn::Linear(6, 5));
    const auto overlapped = column_wise(1, true);
    expect_equal(error_text([&] {
                   parallelize_module(model, mesh, {{"0", overlapped}});
                 }),
                 std::string("ColwiseParallel(\"0\"): overlap for a module of type torch::nn::EmbeddingImpl, which "
                             "multiplies no matrices while its input is gathered; leave overlap out"));
    auto checkpointed = make_layer(4);
    checkpoint_module(*checkpointed);
    expect_equal(error_text([&] { parallelize_module(checkpointed, mesh, overlapped); }),
                 std::string("ColwiseParallel(the module itself): overlap for a layer that is checkpointed by itself, "
                             "whose second forward would not overlap; checkpoint the module around it, or leave "
                             "overlap out"));
    auto layer = make_layer(4);
    parallelize_module(layer, mesh, overlapped);
    expect_throws<StateError>([&] { checkpoint_module(*layer); }, "checkpoint the module around such a layer");
    const auto input = cut(make_input(1, {2, 5, kIn}).set_requires_grad(true), mesh, 1);
    const auto loss = weighted_loss(full_tensor(layer(input)));
    expect_throws<NotImplementedError>(
        [&] { torch::autograd::grad({loss}, {layer->weight}, {}, std::nullopt, /*create_graph=*/true); },
        "its gradients cannot be differentiated again; leave out overlap");
  });
}

}  // namespace tessera::testing
