// What stands beside ops: new tensors, local functions, scopes, pictures.

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linalg_matrix_rank.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/serialize.h>

#include <limits>
#include <sstream>
#include <thread>

#include "comm/context/comm_stats.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/factories.h"
#include "dtensor/local_map.h"
#include "dtensor/random/random.h"
#include "dtensor/visualize_sharding.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("new DTensors are parts of what one device would make", "[dtensor]") {
  auto generator = make_generator(7);
  const auto uniform = at::rand({5, 3}, generator);
  const auto normal = at::randn({5, 3}, generator, at::kDouble);
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto x = zeros({5, 3}, mesh, {Shard(0)}, at::TensorOptions(at::kDouble).requires_grad(true));
      TESSERA_EXPECT(x.requires_grad() && x.is_leaf());
      expect_equal(to_local(x).size(0), chunk_range(5, ranks, mesh.local_rank()).length);
      expect_bit_equal(full_tensor(x).detach(), at::zeros({5, 3}, at::kDouble));
      expect_bit_equal(full_tensor(ones({5}, mesh, {Shard(0)})), at::ones({5}));
      expect_bit_equal(full_tensor(full({2, 3}, 7, mesh)), at::full({2, 3}, 7));
      expect_equal(empty({2}, mesh, {}, at::kInt).scalar_type(), at::kInt);
      expect_bit_equal(full_tensor(arange(1, 8, 2, mesh, {Shard(0)})), at::arange(1, 8, 2));
      expect_bit_equal(full_tensor(linspace(0, 1, 7, mesh, {Shard(0)})), at::linspace(0, 1, 7));

      tessera::manual_seed(7);
      expect_bit_equal(full_tensor(rand({5, 3}, mesh, {Shard(1)})), uniform);
      expect_bit_equal(full_tensor(randn({5, 3}, mesh, {Shard(0)}, at::kDouble)), normal);

      expect_throws<ValueError>([&] { zeros({5}, mesh, {Partial()}); }, "a new tensor has no pending reduction");
      expect_throws<ValueError>([&] { zeros({5}, mesh, {Shard(1)}); }, "zeros: Shard(1) on a tensor of 1 dims");
      expect_throws<ValueError>([&] { ones({5}, mesh, {}, at::Device(at::kCUDA)); }, "leave the device out");
      for (const at::TensorOptions options : {at::TensorOptions().memory_format(at::MemoryFormat::ChannelsLast),
                                              at::TensorOptions().layout(at::kSparse)}) {
        expect_throws<ValueError>([&] { ones({2, 3, 2, 2}, mesh, {}, options); }, "Leave both out");
        expect_throws<ValueError>([&] { arange(0, 4, 1, mesh, {}, options); }, "Leave both out");
      }
      expect_throws<ValueError>([&] { ones({5}, DeviceMesh()); }, "the mesh is empty");
      expect_throws<ValueError>([&] { arange(0, 4, 1, DeviceMesh()); }, "arange: the mesh is empty");
      expect_throws<ValueError>([&] { linspace(0, 4, 2, DeviceMesh()); }, "linspace: the mesh is empty");
    });
  }
}

TEST_CASE("distribute_tensor takes one rank's data or everybody's", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto own = at::full({4}, static_cast<float>(rank));
    expect_bit_equal(full_tensor(distribute_tensor(own, mesh, {Shard(0)}, {.src_data_rank = 2})), at::full({4}, 2.f));
    reset_comm_stats();
    const auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)}, {.src_data_rank = std::nullopt});
    expect_equal(comm_stats().calls(), 0);
    expect_bit_equal(full_tensor(x), ramp({4}));
    expect_throws<ValueError>([&] { distribute_tensor(own, mesh, {Shard(0)}, {.src_data_rank = 3}); },
                              "src_data_rank 3 on an axis of 3 ranks");
  });
}

TEST_CASE("gradients of full_tensor may be terms", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(ramp({3}), mesh, {Shard(0)}).requires_grad_();
    (full_tensor(x, Placements{Partial()}) * (rank + 1)).sum().backward();
    expect_bit_equal(full_tensor(x.grad()), at::full({3}, 3.f));
  });
}

TEST_CASE("gather_shape adds up what ranks hold", "[dtensor]") {
  run_ranks(4, [](int rank) {
    const auto line = init_device_mesh(at::kCPU, {4}), square = init_device_mesh(at::kCPU, {2, 2});
    const std::vector<int64_t> sizes = {5, 1};
    for (const auto& [mesh, placed] : std::vector<std::pair<DeviceMesh, Placements>>{
             {line, {Shard(0)}},              // the last rank has nothing
             {line, {Shard(1)}},              // all but the first have nothing
             {line, {Replicate()}},           // nothing is cut
             {square, {Shard(0), Shard(0)}},  // cut twice
             {square, {Shard(0), Shard(1)}},
             {square, {Partial(), Shard(0)}},
         }) {
      const auto local = to_local(redistribute(empty(sizes, mesh), placed));
      expect_equal(gather_shape(local, mesh, placed), sizes);
    }
    // Sizes that torch.chunk would not cut are added up too.
    expect_equal(gather_shape(at::ones({rank, 2}), line, {Shard(0)}), std::vector<int64_t>{6, 2});
    expect_throws<ValueError>(
        [&] {
          gather_shape(rank == 0 ? at::ones({2}) : at::ones({2, 2}), line, {Shard(0)});
        },
        "gather_shape");
  });
}

TEST_CASE("local_map runs a function of local tensors, uneven shards too", "[dtensor]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto full = ramp({5, 2});
      auto x = distribute_tensor(full, mesh, {Shard(0)}).requires_grad_();
      const auto double_rows = [](const std::vector<at::Tensor>& in) { return std::vector{in[0] * 2 + in[1]}; };
      const auto y = local_map(double_rows, {x, at::ones({2})}, {.out_placements = {{Shard(0)}}})[0];
      expect_bit_equal(full_tensor(y), full * 2 + 1);
      y.sum().backward();
      expect_bit_equal(full_tensor(x.grad()), at::full({5, 2}, 2.f));

      const auto sum = [](const std::vector<at::Tensor>& in) { return std::vector{in[0].sum(0)}; };
      const auto total = local_map(sum, {x.detach()}, {.out_placements = {{Partial()}}})[0];
      expect_bit_equal(full_tensor(total), full.sum(0));

      const LocalMapOptions columns{.out_placements = {{Partial()}}, .in_placements = {Placements{Replicate()}}};
      expect_throws<ValueError>([&] { local_map(sum, {x}, columns); }, "input 0 is Float[5, 2] (Shard(0))");
      expect_throws<ValueError>([&] { local_map(sum, {full}, {.out_placements = {{Partial()}}}); },
                                "which mesh to use");
      expect_throws<ValueError>([&] { local_map(sum, {x}, {.out_placements = {}}); }, "returned 1 tensors");
      if (ranks > 1) {
        const auto one_row = [](const std::vector<at::Tensor>& in) { return std::vector{in[0].sum(0, true)}; };
        const auto rows = local_map(one_row, {x.detach()}, {.out_placements = {{Shard(0)}}})[0];
        expect_equal(rows.size(0), ranks);
        const auto growing = [&](const std::vector<at::Tensor>&) { return std::vector{ramp({mesh.local_rank() + 1})}; };
        expect_throws<ValueError>([&] { local_map(growing, {x}, {.out_placements = {{Shard(0)}}}); },
                                  "on some rank the local sizes do not fit");
        expect_throws<ValueError>([&] { local_map(growing, {x}, {.out_placements = {{Replicate()}}}); },
                                  "Check options.out_placements, or pass options.out_shapes, the global sizes");
        expect_throws<ValueError>(
            [&] {
              local_map(one_row, {x.detach()}, {.out_placements = {{Shard(0)}}, .out_shapes = {{9 * ranks, 2}}});
            },
            "as options.out_placements and options.out_shapes say");
        expect_throws<ValueError>(
            [&] { local_map(one_row, {x.detach()}, {.out_placements = {{Shard(1)}}, .out_shapes = {{ranks}}}); },
            "options.out_shapes has");
      }
    });
  }
}

TEST_CASE("a function that throws on one rank alone makes local_map throw on all", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(ramp({5, 2}), mesh, {Shard(0)});
    const auto fails_on_1 = [&](const std::vector<at::Tensor>& in) {
      TESSERA_CHECK(KeyError, rank != 1, "no such row");
      return in;
    };
    const auto run = [&] { local_map(fails_on_1, {x}, {.out_placements = {{Shard(0)}}}); };
    rank == 1 ? expect_throws<KeyError>(run, "no such row") : expect_throws<ValueError>(run, "the function threw, or");
    expect_bit_equal(full_tensor(x), ramp({5, 2}));  // the ranks are in step
  });
}

TEST_CASE("local_map runs on DTensors without data, and a function may write what was moved for it", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto twice = [](const std::vector<at::Tensor>& x) { return std::vector{x[0].mul_(2)}; };
    const LocalMapOptions options{
        .out_placements = {{Shard(0)}}, .in_placements = {{{Shard(0)}}}, .redistribute_inputs = true};
    const auto without_data =
        local_map(twice, {distribute_tensor(at::empty({5, 2}, at::kMeta), mesh, {Shard(0)})}, options)[0];
    TESSERA_EXPECT(without_data.is_meta());
    expect_equal(without_data.sizes().vec(), std::vector<int64_t>{5, 2});

    const auto columns = distribute_tensor(ramp({5, 2}), mesh, {Shard(1)}).requires_grad_();
    const auto result = local_map(twice, {columns}, options)[0];
    expect_bit_equal(full_tensor(result).detach(), ramp({5, 2}) * 2);
    expect_bit_equal(full_tensor(columns).detach(), ramp({5, 2}));
    result.sum().backward();
    expect_bit_equal(full_tensor(columns.grad()), at::full({5, 2}, 2.f));
    const auto rows = distribute_tensor(ramp({5, 2}), mesh, {Shard(0)}).requires_grad_();
    expect_throws<c10::Error>([&] { local_map(twice, {rows}, options); }, "is being modified inplace");
  });
}

TEST_CASE("copies with NaNs at the same places are copies", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto nan = at::full({2, 2}, std::numeric_limits<double>::quiet_NaN());
    from_local(nan.t(), mesh, {Replicate()}, {.run_check = true});
    from_local(nan.select(0, 0).select(0, 0), mesh, {Replicate()}, {.run_check = true});
    expect_throws<ValueError>(
        [&] { from_local(rank == 0 ? nan : at::zeros_like(nan), mesh, {Replicate()}, {.run_check = true}); },
        "different values");
  });
}

TEST_CASE("what a function of local tensors returns is defined", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto x = distribute_tensor(ramp({2}), init_device_mesh(at::kCPU, {2}), {Shard(0)});
    const auto nothing = [](const std::vector<at::Tensor>&) { return std::vector{at::Tensor()}; };
    expect_throws<ValueError>([&] { local_map(nothing, {x}, {.out_placements = {{Shard(0)}}}); }, "is undefined");
  });
}

TEST_CASE("what a function of local tensors returns on one rank alone is refused on every rank", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto x = distribute_tensor(ramp({4}), init_device_mesh(at::kCPU, {3}), {Shard(0)});
    const auto undefined = [&](const std::vector<at::Tensor>& in) {
      return std::vector{in[0], rank == 1 ? at::Tensor() : in[0]};
    };
    const LocalMapOptions two{.out_placements = {{Shard(0)}, {Shard(0)}}};
    expect_throws<ValueError>([&] { local_map(undefined, {x}, two); },
                              rank == 1 ? "result 1 of the function is undefined" : "on another rank");
    const auto fewer = [&](const std::vector<at::Tensor>& in) {
      return std::vector<at::Tensor>(rank == 2 ? 1 : 2, in[0]);
    };
    expect_throws<ValueError>([&] { local_map(fewer, {x}, two); },
                              rank == 2 ? "returned 1 tensors" : "an undefined result, or not 2 of them");
  });
}

TEST_CASE("local tensors of different numbers of dims are refused on every rank", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto local = rank == 0 ? ramp({2, 2}) : ramp({2});
    expect_throws<ValueError>([&] { from_local(local, mesh, {Shard(1)}, {.run_check = true}); }, "numbers of dims");
    const auto pass = [&](const std::vector<at::Tensor>&) { return std::vector{local}; };
    const auto x = distribute_tensor(ramp({2}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { local_map(pass, {x}, {.out_placements = {{Shard(1)}}}); }, "numbers of dims");
  });
}

TEST_CASE("in an ImplicitReplication scope plain tensors count as copies", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(ramp({3, 2}), mesh, {Shard(0)}).requires_grad_();
    const auto plain = ramp({2});
    expect_throws<ValueError>([&] { x + plain; }, "an ImplicitReplication scope");
    const ImplicitReplication scope;
    const auto y = x * plain;
    expect_bit_equal(full_tensor(y), ramp({3, 2}) * plain);
    y.sum().backward();
    expect_bit_equal(full_tensor(x.grad()), plain.expand({3, 2}));
    auto written = ramp({3, 2});
    expect_throws<ValueError>([&] { written.add_(x.detach()); }, "DTensors and plain tensors are mixed");
  });
}

TEST_CASE("backward needs no ImplicitReplication scope, and plain leaves get plain gradients", "[dtensor]") {
  const auto whole = at::randn({5, 3}, make_generator(3), at::kDouble);
  const auto numbers = at::randn({3}, make_generator(4), at::kDouble);
  const auto mask = ramp({3}) > 1;
  // Each saves a plain operand for its backward: by an op of its own, in a list, within ops that ATen composes, in a
  // mask, as an index, in a function of its own.
  const auto loss_of = [&](const at::Tensor& x, const at::Tensor& leaf) {
    auto y = x * leaf + at::linear(x, at::stack({leaf, leaf * 2, leaf * 3})).tanh();
    y = at::cat({y, leaf.unsqueeze(0) * 2, y.masked_fill(mask, 2).index_select(0, at::tensor({2, 0, 2}))});
    y = at::where(mask, y, y * y) + at::scalar_tensor(2) * at::layer_norm(y, {3}, leaf, leaf * leaf);
    return y.matmul(leaf).square().sum();
  };
  auto dense = whole.clone().requires_grad_(), dense_leaf = numbers.clone().requires_grad_();
  loss_of(dense, dense_leaf).backward();
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
        auto x = distribute_tensor(whole, mesh, {placement}).requires_grad_();
        auto leaf = numbers.clone().requires_grad_();
        at::Tensor loss;
        {
          const ImplicitReplication scope, nested;
          loss = loss_of(x, leaf);
        }
        expect_throws<ValueError>([&] { x* leaf; }, "are mixed");  // the scopes have ended
        loss.backward();
        expect_close(full_tensor(x.grad()), dense.grad());
        expect_close(leaf.grad(), dense_leaf.grad());
      }
    });
  }
}

TEST_CASE("plain tensors of an ImplicitReplication scope are numbers, lists and operands of any op", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto values = at::randn({4, 3}, make_generator(3), at::kDouble);
    auto x = distribute_tensor(values, mesh, {Shard(0)}).requires_grad_();
    auto scale = at::scalar_tensor(3, at::kDouble).requires_grad_();
    const auto mask = at::ones({3}, at::kDouble);
    at::Tensor product;
    {
      const ImplicitReplication scope;
      (x * scale).sum().backward();
      TESSERA_EXPECT(!is_dtensor(scale.grad()));
      expect_close(scale.grad(), values.sum());
      product = x * mask;
      expect_close(full_tensor(at::silu_backward(x.detach(), values)), at::silu_backward(values, values));
      const auto rank = at::linalg_matrix_rank(x.detach(), at::scalar_tensor(0.1, at::kDouble).view({1}));
      expect_equal(full_tensor(rank).item<int64_t>(), 3);
      bool elsewhere = true;
      std::thread([&] { elsewhere = ImplicitReplication::active(); }).join();
      TESSERA_EXPECT(!elsewhere);
    }
    mask.zero_();
    expect_throws<c10::Error>([&] { product.sum().backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("in an ExplicitRedistribution scope ops do not communicate", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto rows = distribute_tensor(ramp({4, 4}), mesh, {Shard(0)});
    const auto columns = distribute_tensor(ramp({4, 4}), mesh, {Shard(1)});
    const auto copies = distribute_tensor(ramp({4, 4}), mesh, {Replicate()});
    {
      const ExplicitRedistribution scope;
      expect_throws<StateError>([&] { rows + columns; },
                                "aten::add.Tensor would redistribute operand 1 to (Shard(0)) (all_to_all(axis 0: "
                                "Shard(1) → Shard(0))), which ExplicitRedistribution forbids");
      expect_bit_equal(full_tensor(rows + copies), ramp({4, 4}) * 2);
      expect_bit_equal(full_tensor(rows + redistribute(columns, {Shard(0)})), ramp({4, 4}) * 2);
      const ExplicitRedistribution strict(true);
      expect_throws<StateError>([&] { rows + copies; }, "chunk(axis 0: Replicate() → Shard(0))");
    }
    expect_bit_equal(full_tensor(rows + columns), ramp({4, 4}) * 2);
  });
}

TEST_CASE("in an ExplicitRedistribution scope axes of one rank do not count, since they send nothing", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
    auto x = distribute_tensor(ramp({4, 4}), mesh, {Shard(0), Replicate()});
    const auto rows = distribute_tensor(ramp({4, 4}), mesh, {Shard(0), Shard(0)});
    const auto columns = distribute_tensor(ramp({4, 4}), mesh, {Shard(1), Replicate()});
    const auto y = distribute_tensor(ramp({4, 4}), mesh, {Replicate(), Shard(1)});
    const ExplicitRedistribution scope;
    expect_bit_equal(full_tensor(rows + columns), ramp({4, 4}) * 2);  // an all_to_all over dp, a cut over tp
    expect_throws<StateError>([&] { x.add_(y); }, "which ExplicitRedistribution forbids");  // it would gather it again
    const auto z = distribute_tensor(ramp({4, 4}), mesh, {Replicate(), Shard(0)});
    expect_throws<StateError>([&] { y + z; }, "all_to_all(axis 1");
    const ExplicitRedistribution strict(true);
    expect_throws<StateError>([&] { rows + columns; }, "which ExplicitRedistribution forbids");
  });
}

TEST_CASE("what needs a data pointer says that a DTensor has none", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    std::ostringstream stream;
    expect_throws<c10::Error>([&] { torch::save(x, stream); },
                              "a DTensor has no data pointer of its own; take to_local() or full_tensor() first. To ");
    expect_throws<c10::Error>([&] { torch::save(x, stream); },
                              "To save, dcp::save (checkpoint/checkpoint.h) writes whole models");
  });
}

TEST_CASE("printing a DTensor is refused with what to print, and describe() prints without communication",
          "[dtensor]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int rank) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"dp"});
      const auto x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
      reset_comm_stats();
      std::ostringstream refused, stream;
      expect_throws<c10::Error>([&] { refused << x; },
                                "To print, std::cout << describe(x) (dtensor/visualize_sharding.h), which sends "
                                "nothing, or full_tensor(x), taken on every rank");
      stream << describe(x);
      expect_equal(stream.str(),
                   fmt::format("DTensor Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {{dp: {}}}), local [{}, 3]", ranks,
                               chunk_range(5, ranks, rank).length));
      expect_equal(comm_stats().calls(), 0);
      std::ostringstream whole, plain;
      whole << full_tensor(x);
      plain << ramp({5, 3});
      expect_equal(whole.str(), plain.str());
    });
  }
}

TEST_CASE("a plain value without dims: index_put_ takes it or names what to pass, and each of that works",
          "[dtensor]") {
  using at::indexing::TensorIndex;
  const auto mask = ramp({5, 3}) > 3;
  const auto expected = ramp({5, 3}).masked_fill(mask, 7);
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto where = distribute_tensor(mask, mesh, {Shard(0)});
      const auto seven = at::scalar_tensor(7.);
      auto x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
      try {  // libtorch 2.11 does not compare memory
        x.index_put_({TensorIndex(where)}, seven);
        expect_bit_equal(full_tensor(x), expected);
        x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
      } catch (const c10::Error& refusal) {
        TESSERA_EXPECT(std::string_view(refusal.what())
                           .find("In x.index_put_(indices, value), where libtorch compares the memory of x and of a "
                                 "value without dims, pass value.item() or a DTensor, or call at::index_put_") !=
                       std::string_view::npos);
      }
      expect_bit_equal(full_tensor(x), ramp({5, 3}));
      x.index_put_({TensorIndex(where)}, seven.item());
      expect_bit_equal(full_tensor(x), expected);
      x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
      x.index_put_({TensorIndex(where)}, distribute_tensor(seven, mesh, {Replicate()}));
      expect_bit_equal(full_tensor(x), expected);
      x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0)});
      at::index_put_(x, {where}, seven);
      expect_bit_equal(full_tensor(x), expected);
      TESSERA_EXPECT(placements(x) == Placements{Shard(0)});
    });
  }
}

TEST_CASE("pictures show which rank holds what", "[dtensor]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0), Shard(1)});
    expect_equal(visualize_sharding(x),
                 "                dim 1 0:2       dim 1 2:3\n"
                 "dim 0 0:3       0               1\n"
                 "dim 0 3:5       2               3\n");
    const auto rows = distribute_tensor(ramp({5}), mesh, {Shard(0, 1), Shard(0)});
    expect_equal(visualize_sharding(rows),
                 "\n"
                 "dim 0 0:2       0\n"
                 "dim 0 2:3       2\n"
                 "dim 0 3:4       1\n"
                 "dim 0 4:5       3\n");
    const auto copies = distribute_tensor(ramp({5}), mesh, {Replicate(), Shard(0)});
    TESSERA_EXPECT(shard_cells(copies) == (std::vector<ShardCell>{{{0, 3}, {0, 1}, {0, 2}}, {{3, 2}, {0, 1}, {1, 3}}}));
    expect_equal(
        describe(distribute_tensor(ramp({4, 2}), mesh, {Shard(0), Replicate()})),
        std::string("DTensor Float[4, 2] (Shard(0), Replicate()) on DeviceMesh(cpu, {dp: 2, tp: 2}), local [2, 2]"));
    expect_equal(describe(ramp({2})), std::string("Float[2]"));
    const auto svg = visualize_sharding_svg(x);
    TESSERA_EXPECT(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    expect_throws<ValueError>(
        [&] {
          visualize_sharding(distribute_tensor(ramp({2, 2, 2}), mesh, {Shard(0), Shard(1)}));
        },
        "has 3 dims");
  });
}

}  // namespace tessera
