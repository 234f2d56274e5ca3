#include "dtensor/dtensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "comm/collectives.h"
#include "comm/context/comm_stats.h"
#include "comm/process_group.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

at::Tensor no_rule(const at::Tensor& x) {
  return x.clone();
}

/// Running sums, which no shard can tell alone.
at::Tensor& sum_up_(at::Tensor& x) {
  return x.cumsum_(0);
}

TORCH_LIBRARY(tessera_test, library) {
  library.def("no_rule(Tensor x) -> Tensor");
  library.impl("no_rule", c10::DispatchKey::CPU, &no_rule);
  library.def("sum_up_(Tensor(a!) x) -> Tensor(a!)");
  library.impl("sum_up_", c10::DispatchKey::CPU, &sum_up_);
  library.def("draws(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  library.impl("draws", c10::DispatchKey::CPU, &no_rule);
}

at::Tensor call_op_without_rule(const at::Tensor& x, const char* name = "tessera_test::no_rule") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

void sum_up_without_rule(at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::sum_up_", "").typed<at::Tensor&(at::Tensor&)>();
  op.call(x);
}

}  // namespace

TEST_CASE("a DTensor has the global sizes and the real device, and no data of its own", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
    TESSERA_EXPECT(is_dtensor(x));
    TESSERA_EXPECT(!is_dtensor(ramp({2})));
    TESSERA_EXPECT(!is_dtensor(at::Tensor()));
    expect_equal(x.sizes().vec(), std::vector<int64_t>{5, 3});
    expect_equal(x.strides().vec(), std::vector<int64_t>{3, 1});
    TESSERA_EXPECT(x.device().is_cpu());
    TESSERA_EXPECT(x.scalar_type() == at::kFloat);
    expect_equal(to_string(placements(x)), "(Shard(0))");
    TESSERA_EXPECT(device_mesh(x) == mesh);
    expect_bit_equal(to_local(x), rank == 0 ? ramp({5, 3}).narrow(0, 0, 3) : ramp({5, 3}).narrow(0, 3, 2));
    expect_throws<std::exception>([&] { x.data_ptr(); }, "a DTensor has no data pointer of its own");
    expect_equal(dtensor_spec(x)->to_string(), "Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {dp: 2})");
  });
}

TEST_CASE("distribute_tensor takes the first rank's data and makes a leaf", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    auto mine = at::full({4, 2}, static_cast<double>(rank), at::kFloat);
    mine.set_requires_grad(true);
    for (const auto& placement : std::vector<Placement>{Replicate(), Shard(0), Shard(1), Shard(-1)}) {
      const auto x = distribute_tensor(mine, mesh, {placement});
      TESSERA_EXPECT(x.is_leaf() && x.requires_grad());
      expect_bit_equal(full_tensor(x.detach()), at::zeros({4, 2}));
    }
    expect_equal(mine[0][0].item<float>(), static_cast<float>(rank));
  });
}

TEST_CASE("a detached DTensor shares data and writes, and keeps its sizes", "[dtensor]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"dp"});
    for (const auto& placement : std::vector<Placement>{Replicate(), Shard(0), Shard(1), Partial()}) {
      const auto x = redistribute(distribute_tensor(ramp({5, 2}), mesh, {Replicate()}), {placement});
      const auto part = x.slice(0, 1, 4).detach();
      expect_bit_equal(full_tensor(part), ramp({5, 2}).slice(0, 1, 4));
    }
    const auto x = distribute_tensor(ramp({5, 2}), mesh, {Shard(0)}).requires_grad_(true);
    const auto loss = (x * x).sum();
    auto detached = x.detach();
    TESSERA_EXPECT(!detached.requires_grad() && detached.is_leaf() && placements(detached) == placements(x));
    TESSERA_EXPECT(detached._version() == x._version());
    detached.t_();
    expect_equal(x.sizes(), at::IntArrayRef({5, 2}));
    detached.mul_(2);
    expect_bit_equal(full_tensor(x).detach(), ramp({5, 2}) * 2);
    TESSERA_EXPECT(detached._version() == x._version());
    expect_throws<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("distribute_tensor refuses what it cannot cut", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { distribute_tensor(x, mesh, {Shard(0)}); }, "a DTensor already");
    expect_throws<ValueError>([&] { distribute_tensor(at::Tensor(), mesh, {Shard(0)}); }, "undefined");
    expect_throws<ValueError>([&] { distribute_tensor(ramp({4}), mesh, {Shard(1)}); }, "distribute_tensor: Shard(1)");
    expect_throws<ValueError>([&] { distribute_tensor(ramp({4}), mesh, {}); }, "0 placements");
    expect_throws<ValueError>([&] { distribute_tensor(ramp({4}), mesh, {Partial()}); }, "Partial(Sum)");
    auto leaf = ramp({4}).set_requires_grad(true);
    expect_throws<ValueError>([&] { distribute_tensor(leaf * 2, mesh, {Shard(0)}); }, "detach()");
  });
}

TEST_CASE("from_local and to_local share memory and pass gradients", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto local = at::full({2, 3}, rank + 1., at::kFloat);
    const auto x = from_local(local, mesh, {Shard(0)});
    expect_equal(x.sizes().vec(), std::vector<int64_t>{4, 3});
    TESSERA_EXPECT(to_local(x).data_ptr() == local.data_ptr());

    local.set_requires_grad(true);
    const auto y = from_local(local, mesh, {Shard(0)});
    (full_tensor(y) * full_tensor(y)).sum().backward();
    expect_bit_equal(local.grad(), at::full({2, 3}, 2. * (rank + 1), at::kFloat));
  });
}

TEST_CASE("a term's gradient is that of the sum, a part of that of the mean, and otherwise the program's to say",
          "[dtensor]") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    const auto gradient = [&](const Placements& placements, FromLocalOptions options = {}) {
      const auto term = at::full({3}, rank, at::kDouble).requires_grad_();
      full_tensor(from_local(term, mesh, placements, options)).square().sum().backward();
      return term.grad();
    };
    const auto of = [](double number) { return at::full({3}, number, at::kDouble); };
    const Partial sum, mean(ReduceOp::Avg), largest(ReduceOp::Max);
    expect_close(gradient({sum, sum}), of(2 * 6));
    expect_close(gradient({mean, mean}), of(2 * 1.5 / 4));
    expect_close(gradient({sum, mean}), of(2 * 3 / 2.));
    expect_throws<NotImplementedError>([&] { gradient({largest, largest}); }, "say in grad_placements");
    expect_close(gradient({largest, largest}, {.grad_placements = Placements{Replicate(), Replicate()}}), of(2 * 3));
  });
}

TEST_CASE("from_local of uneven shards needs the shape", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto full = ramp({5, 3});
    const auto local = rank == 0 ? full.narrow(0, 0, 3) : full.narrow(0, 3, 2);
    const auto x = from_local(local, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{5, 3}, .run_check = true});
    expect_bit_equal(full_tensor(x), full);
    expect_throws<ValueError>([&] { from_local(local, mesh, {Shard(0)}, {.run_check = true}); }, "options.shape");
    expect_throws<ValueError>(
        [&] {
          from_local(local, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{7, 3}, .run_check = true});
        },
        "options.shape");
    expect_throws<ValueError>([&] { from_local(local, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{5}}); },
                              "from_local: shape [5] for a local tensor of 2 dims");
  });
}

TEST_CASE("from_local with run_check finds copies that differ on one rank", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto same = ramp({2, 2});
    expect_bit_equal(full_tensor(from_local(same, mesh, {Replicate()}, {.run_check = true})), same);
    const auto other = rank == 2 ? same + 1 : same;
    expect_throws<ValueError>([&] { from_local(other, mesh, {Replicate()}, {.run_check = true}); },
                              "hold different values");
    const auto longer = rank == 1 ? ramp({3, 2}) : same;
    expect_throws<ValueError>([&] { from_local(longer, mesh, {Replicate()}, {.run_check = true}); }, "options.shape");
  });
}

TEST_CASE("from_local refuses DTensors, norms to be and placements that do not fit", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = from_local(ramp({2}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { from_local(x, mesh, {Shard(0)}); }, "a DTensor already");
    expect_throws<ValueError>([&] { from_local(ramp({2}), mesh, {Shard(0), Shard(0)}); }, "2 placements");
    expect_throws<ValueError>([&] { from_local(ramp({2}), mesh, {Shard(1)}); }, "dim must be in [-1, 0]");
    expect_throws<ValueError>([&] { from_local(ramp({}), mesh, {Shard(0)}); }, "use Replicate() for a scalar");
    expect_throws<ValueError>([&] { from_local(ramp({2}), mesh, {NormPartial(2)}); }, "NormPartial(2)");
    expect_throws<ValueError>([&] { to_local(ramp({2})); }, "is not a DTensor; make one with distribute_tensor");
    expect_throws<ValueError>([&] { to_local(ramp({2})); }, "plain between forward and backward: use it as it is");
    expect_throws<ValueError>([&] { placements(at::Tensor()); }, "an undefined tensor is not a DTensor");
  });
}

TEST_CASE("full_tensor gives a plain tensor as it is, and sends nothing for it", "[dtensor]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [](int rank) {
      auto plain = ramp({5});
      plain.set_requires_grad(true);
      reset_comm_stats();
      TESSERA_EXPECT(full_tensor(plain).is_same(plain));
      const auto result = plain * (rank + 1);
      full_tensor(result).sum().backward();
      expect_bit_equal(plain.grad(), at::full({5}, rank + 1., at::kFloat));
      expect_equal(comm_stats().calls(), 0);
      expect_throws<ValueError>([&] { full_tensor(plain, Placements{Replicate()}); },
                                "grad_placements (Replicate()) for Float[5], a plain tensor");
      expect_throws<ValueError>([&] { full_tensor(at::Tensor()); }, "an undefined tensor is not a DTensor");
    });
  }
}

TEST_CASE("to_local's gradient lies as grad_placements say", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(ramp({4}), mesh, {Replicate()});
    x.set_requires_grad(true);
    // Each rank uses the copy in its own way: the gradient is the sum of both.
    (to_local(x, Placements{Partial()}) * (rank + 1)).sum().backward();
    expect_bit_equal(full_tensor(x.grad()), at::full({4}, 3., at::kFloat));
  });
}

TEST_CASE("grad_placements that cut otherwise than the tensor are refused on every rank, also where sizes agree",
          "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto row = distribute_tensor(ramp({1, 4}), mesh, {Replicate()});  // cut on dim 0, rank 0 has all of it
    const Placements cut{Shard(0)};
    expect_bit_equal(to_local(row, cut), ramp({1, 4}));  // nothing records a gradient
    row.set_requires_grad(true);
    expect_throws<ValueError>([&] { to_local(row, cut); },
                              "coordinate [1], the local tensor and its gradient have sizes [1, 4], but those "
                              "placements have [0, 4]");
    expect_throws<ValueError>([&] { take_local(row * 2, cut); }, "pass ones that cut the same dims");
  });
}

TEST_CASE("grad_placements may cut otherwise over one rank, and where every rank's sizes are the same", "[dtensor]") {
  run_ranks(4, [](int) {
    const auto gradient = [](const DeviceMesh& mesh, const Placements& placements, const Placements& grads) {
      auto x = distribute_tensor(ramp({8, 3}), mesh, placements);
      x.set_requires_grad(true);
      to_local(x * 2, grads).square().sum().backward();
      expect_bit_equal(full_tensor(x.grad()), ramp({8, 3}) * 8);
    };
    gradient(init_device_mesh(at::kCPU, {4, 1}), {Shard(0), Replicate()}, {Shard(0), Shard(1)});
    const auto square = init_device_mesh(at::kCPU, {2, 2});
    gradient(square, {Shard(0, 1), Shard(0)}, {Shard(0, 1), Shard(0)});
    const auto x = distribute_tensor(ramp({8, 3}), square, {Shard(0), Shard(0)});
    x.set_requires_grad(true);
    expect_equal(to_local(x, Placements{Shard(0, 1), Shard(0)}).size(0), 2);  // the other cut is the outer one
    const auto uneven = distribute_tensor(ramp({6, 3}), square, {Shard(0), Shard(0)});
    uneven.set_requires_grad(true);
    expect_throws<ValueError>(
        [&] {
          to_local(uneven, Placements{Shard(0, 1), Shard(0)});
        },
        "coordinate [0, 1], the local tensor and its gradient have sizes [1, 3]");
  });
}

TEST_CASE("a Partial tensor's gradient reaches every term", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto term = at::full({3}, rank + 1., at::kFloat);
    term.set_requires_grad(true);
    full_tensor(from_local(term, mesh, {Partial()})).square().sum().backward();
    expect_bit_equal(term.grad(), at::full({3}, 6., at::kFloat));
  });
}

TEST_CASE("DTensors do not mix with plain tensors, except scalars", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { x + ramp({4}); },
                              "aten::add.Tensor: DTensors and plain tensors are mixed: Float[4] (Shard(0)) on "
                              "DeviceMesh(cpu, {dp: 2}), plain Float[4] tensor. Make the plain ones DTensors with "
                              "distribute_tensor(t, mesh, {Replicate()})");
    expect_throws<ValueError>([&] { x + ramp({4}); }, "(not a batch that differs between ranks)");
    expect_throws<ValueError>([&] { x.set_(ramp({4})); }, "load before the model is sharded");
    expect_throws<ValueError>([&] { ramp({4}).add_(x); }, "mixed");
    expect_throws<ValueError>([&] { x.equal(ramp({4})); }, "aten::equal: one of the tensors is a plain tensor");
    expect_bit_equal(full_tensor(x * 2 + at::full({}, 1., at::kFloat)), ramp({4}) * 2 + 1);
    TESSERA_EXPECT(x.equal(distribute_tensor(ramp({4}), mesh, {Replicate()})));
  });
}

TEST_CASE("where a plain tensor is written, the error offers what helps there", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    const auto message = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const ValueError& error) {
        return error.what();
      }
      return "nothing was thrown";
    };
    const auto has = [](const std::string& text, std::string_view part) { return text.find(part) != text.npos; };
    auto total = at::zeros({}), buffer = ramp({2, 4});
    {
      const auto text = message([&] { total += x.sum(); });
      TESSERA_EXPECT(
          has(text, "write t = t + x, a new tensor, instead of t += x, write full_tensor() of the DTensors"));
      TESSERA_EXPECT(!has(text, "optimizer") && !has(text, "clip_grad_norm_"));
      const ImplicitReplication scope;
      expect_equal(message([&] { total += x.sum(); }), text);
    }
    const auto copy = message([&] { buffer.select(0, 1).copy_(x); });
    TESSERA_EXPECT(has(copy, "write full_tensor() of the DTensors") && !has(copy, "t += x") && !has(copy, "optimizer"));
    const auto update = message([&] { buffer.select(0, 1).add_(x); });
    TESSERA_EXPECT(has(update, "t = t + x") && has(update, "If this is an optimizer step, run backward() first"));
    const auto scale = message([&] { buffer.mul_(x.sum()); });
    TESSERA_EXPECT(has(scale, "To clip gradients, call tessera::clip_grad_norm_") && !has(scale, "optimizer"));
    const auto scale_list = message([&] { at::_foreach_mul_({buffer}, x.sum()); });
    TESSERA_EXPECT(has(scale_list, "To clip gradients, call tessera::clip_grad_norm_"));
    const auto out = message([&] { at::sum_out(total, x, at::IntArrayRef{0}); });
    TESSERA_EXPECT(has(out, "take the result without out=, or copy full_tensor() of it"));
  });
}

TEST_CASE("a collective takes no DTensor", "[dtensor]") {
  run_ranks(2, [](int) {
    auto x = distribute_tensor(ramp({4}), init_device_mesh(at::kCPU, {2}, {"dp"}), {Shard(0)});
    expect_throws<ValueError>([&] { all_reduce(x, ReduceOp::Sum, default_group()); },
                              "all_reduce: the tensor is a DTensor, which has no memory of its own; pass to_local()");
  });
}

TEST_CASE("operands on different meshes are refused", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto a = distribute_tensor(ramp({4}), init_device_mesh(at::kCPU, {2}, {"a"}), {Shard(0)});
    const auto b = distribute_tensor(ramp({4}), init_device_mesh(at::kCPU, {2}, {"b"}), {Shard(0)});
    expect_throws<ValueError>([&] { a + b; }, "operands lie on different meshes");
    expect_throws<ValueError>([&] { a + b; }, "They are no parts of one mesh, so take full_tensor() of one");
    expect_throws<ValueError>([&] { at::stack({a.norm(), b.norm()}); }, "call tessera::clip_grad_norm_");
    const auto grid = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
    const auto whole = distribute_tensor(ramp({4}), grid, {Replicate(), Shard(0)});
    const auto part = distribute_tensor(ramp({4}), grid["tp"], {Shard(0)});
    expect_throws<ValueError>([&] { whole + part; }, ". redistribute(tensor, mesh, placements) carries one over");
  });
}

TEST_CASE("ops without a rule say so, with the remedy", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    expect_throws<NotImplementedError>(
        [&] { call_op_without_rule(x); },
        "tessera_test::no_rule has no sharding rule, so it cannot run on Float[4] (Shard(0)) on "
        "DeviceMesh(cpu, {dp: 2}). Take to_local() or full_tensor()");
  });
}

TEST_CASE("a scope around backward holds for the nodes of a GPU, which have a thread of their own else", "[dtensor]") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    auto& autograd = c10::AutogradState::get_tls_state();
    autograd.set_multithreading_enabled(true);  // as where ranks are processes
    const auto mesh = init_device_mesh(device.type(), {2});
    const auto x = distribute_tensor(ramp({5}).to(device), mesh, {Shard(0)}).requires_grad_();
    {
      const ImplicitReplication scope;
      const ExplicitRedistribution nested;
      (x * at::full({5}, 3, device)).sum().backward();
    }
    TESSERA_EXPECT(autograd.get_multithreading_enabled());
    autograd.set_multithreading_enabled(false);
    expect_bit_equal(full_tensor(x.grad()).cpu(), at::full({5}, 3.F));
  });
}

TEST_CASE("in a ReplicateAndRun scope ops without a rule run on whole tensors", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    const auto pending = from_local(ramp({4}) * rank, mesh, {Partial()});
    {
      const ReplicateAndRun outer, inner;
      for (int call = 0; call < 2; ++call) {  // of which the second finds its plan
        const auto result = call_op_without_rule(x);
        expect_equal(to_string(placements(result)), "(Replicate())");
        expect_bit_equal(to_local(result), ramp({4}));
      }
      expect_bit_equal(to_local(call_op_without_rule(pending)), ramp({4}) * 3);
      sum_up_without_rule(x);
      expect_equal(to_string(placements(x)), "(Shard(0))");
      expect_throws<NotImplementedError>([&] { call_op_without_rule(x, "tessera_test::draws"); },
                                         "tessera_test::draws draws random numbers");
    }
    expect_bit_equal(full_tensor(x), ramp({4}).cumsum(0));
    expect_throws<NotImplementedError>([&] { call_op_without_rule(x); }, "ReplicateAndRun scope");
  });
}

TEST_CASE("an in-place op never moves what it writes", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto rows = distribute_tensor(ramp({4, 4}), mesh, {Shard(0)});
    const auto columns = distribute_tensor(ramp({4, 4}), mesh, {Shard(1)});
    const auto local = to_local(rows);
    rows.add_(columns);
    expect_equal(to_string(placements(rows)), "(Shard(0))");
    expect_bit_equal(full_tensor(rows), ramp({4, 4}) * 2);
    TESSERA_EXPECT(to_local(rows).data_ptr() == local.data_ptr());

    auto terms = from_local(ramp({4}), mesh, {Partial()});
    terms.add_(1);
    expect_bit_equal(full_tensor(terms), ramp({4}) * 2 + 1);
    terms.mul_(3);
    expect_bit_equal(full_tensor(terms), ramp({4}) * 6 + 3);
    terms.exp_();
    expect_equal(to_string(placements(terms)), "(Partial(Sum))");
    expect_close(full_tensor(terms), (ramp({4}) * 6 + 3).exp());
  });
}

TEST_CASE("set_data turns a tensor from plain to DTensor and back", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto parameter = ramp({4, 2}).set_requires_grad(true);
    const auto* impl = parameter.unsafeGetTensorImpl();
    parameter.set_data(distribute_tensor(ramp({4, 2}), mesh, {Shard(0)}));
    TESSERA_EXPECT(is_dtensor(parameter) && parameter.requires_grad() && parameter.is_leaf());
    parameter.square().sum().backward();
    TESSERA_EXPECT(is_dtensor(parameter.grad()));
    expect_bit_equal(full_tensor(parameter.grad()), ramp({4, 2}) * 2);

    parameter.mutable_grad() = at::Tensor();
    parameter.set_data(ramp({4, 2}) + 1);
    TESSERA_EXPECT(!is_dtensor(parameter));
    TESSERA_EXPECT(parameter.unsafeGetTensorImpl() == impl);
    parameter.square().sum().backward();
    expect_bit_equal(parameter.grad(), (ramp({4, 2}) + 1) * 2);
  });
}

TEST_CASE("in inference mode views are of the kind of what they view", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto whole = ramp({5, 3});
    const auto normal = distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_(true);
    at::Tensor inference;
    {
      const c10::InferenceMode guard;
      inference = distribute_tensor(whole, mesh, {Shard(0)});
      for (const auto& viewed : {normal, inference}) {
        for (const auto& view : {viewed.t(), viewed.slice(1, 0, 2), viewed.detach(), viewed.view({15}),
                                 viewed.chunk(2, 1)[1], viewed.unsqueeze(0).expand({2, 5, 3})}) {
          TESSERA_EXPECT(view.is_inference() == viewed.is_inference());
        }
        expect_bit_equal(full_tensor(viewed.mm(viewed.t())), whole.mm(whole.t()));
      }
    }
    TESSERA_EXPECT(inference.t().is_inference());
    normal.t().sum().backward();
    expect_bit_equal(full_tensor(normal.grad()), at::ones({5, 3}));
  });
}

TEST_CASE("item gives every rank the reduced value", "[dtensor]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(ramp({7}), mesh, {Shard(0)});
    expect_equal(x.sum().item<float>(), 21.f);
    expect_equal(x.max().item<float>(), 6.f);
    expect_equal(x.mean().item<float>(), 3.f);
  });
}

}  // namespace tessera
