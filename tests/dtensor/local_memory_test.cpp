// Memory and gradients of what passes to_local and from_local.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/full.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

at::Tensor leaf(const at::Tensor& value, const DeviceMesh& mesh) {
  return distribute_tensor(value, mesh, {Shard(0)}).set_requires_grad(true);
}

}  // namespace

TEST_CASE("from_local makes the same strides on every rank", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    // Of one row nothing tells that it is transposed.
    const auto full = ramp({3, 4});
    const auto rows = rank == 0 ? full.narrow(0, 0, 2) : full.narrow(0, 2, 1);
    const auto transposed = rows.t().contiguous().t();
    const auto x = from_local(transposed, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{3, 4}});
    expect_equal(x.strides().vec(), std::vector<int64_t>{4, 1});
    TESSERA_EXPECT(to_local(x).is_contiguous());
    expect_bit_equal(full_tensor(x.view({12})), full.view({12}));
  });
}

TEST_CASE("from_local keeps a layout that comes with strides", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto columns = (ramp({4, 2}) + rank).t();
    const auto x = from_local(columns, mesh, {Shard(0)}, {.stride = std::vector<int64_t>{1, 4}});
    TESSERA_EXPECT(to_local(x).data_ptr() == columns.data_ptr());
    expect_equal(x.strides().vec(), std::vector<int64_t>{1, 4});

    const auto copy = from_local(columns, mesh, {Shard(0)});
    copy.view({16}).mul_(2);
    expect_bit_equal(to_local(copy), columns * 2);
  });
}

TEST_CASE("what is conjugated or negated lazily is gathered as it reads", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto full = ramp({4});
    const auto part = full.narrow(0, 2 * rank, 2);
    const auto conjugates = from_local(at::complex(part, part).conj(), mesh, {Shard(0)});
    TESSERA_EXPECT(full_tensor(conjugates).equal(at::complex(full, -full)));
    expect_bit_equal(full_tensor(from_local(at::_neg_view(part), mesh, {Shard(0)})), -full);
  });
}

TEST_CASE("a transposed gradient that passes to_local lies as its leaf does", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(ramp({6, 4}), mesh);
    (to_local(x).t().contiguous().square()).sum().backward();
    expect_equal(x.grad().strides().vec(), std::vector<int64_t>{4, 1});
    TESSERA_EXPECT(to_local(x.grad()).is_contiguous());
    expect_bit_equal(full_tensor(x.grad()), ramp({6, 4}) * 2);
  });
}

TEST_CASE("a gradient of one number for all elements is accumulated", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(ramp({3, 2}), mesh);
    for (int pass = 0; pass < 2; ++pass) {
      to_local(x).sum().backward();
    }
    expect_bit_equal(full_tensor(x.grad()), at::full({3, 2}, 2.f));
  });
}

TEST_CASE("leaves whose local tensors are added do not share a gradient", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(ramp({3, 2}), mesh);
    const auto w = leaf(at::full({3, 2}, 1.f), mesh);
    (to_local(x) + to_local(w)).square().sum().backward();
    x.grad().mul_(2);
    expect_bit_equal(full_tensor(x.grad()), (ramp({3, 2}) + 1) * 4);
    expect_bit_equal(full_tensor(w.grad()), (ramp({3, 2}) + 1) * 2);
  });
}

TEST_CASE("local leaves whose DTensors are added do not share a gradient", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = at::full({2}, rank + 1.f).set_requires_grad(true);
    const auto w = at::full({2}, 2.f).set_requires_grad(true);
    const auto sum = from_local(x, mesh, {Shard(0)}) + from_local(w, mesh, {Shard(0)});
    full_tensor(sum.square().sum()).backward();
    x.grad().mul_(2);
    expect_bit_equal(x.grad(), at::full({2}, 4 * (rank + 3.f)));
    expect_bit_equal(w.grad(), at::full({2}, 2 * (rank + 3.f)));
  });
}

TEST_CASE("a gradient that nobody else holds is not copied", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(ramp({3, 2}), mesh);
    const auto local = to_local(x);
    const void* seen = nullptr;
    local.register_hook([&](const at::Tensor& grad) { seen = grad.const_data_ptr(); });
    local.square().sum().backward();
    TESSERA_EXPECT(to_local(x.grad()).const_data_ptr() == seen);

    const auto leaf_part = at::full({2}, 3.f).set_requires_grad(true);
    const auto part = from_local(leaf_part, mesh, {Shard(0)});
    part.register_hook([&](const at::Tensor& grad) { seen = to_local(grad).const_data_ptr(); });
    full_tensor(part.square().sum()).backward();
    TESSERA_EXPECT(leaf_part.grad().const_data_ptr() == seen);
  });
}

TEST_CASE("a local tensor is not written behind autograd's back", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto refused = "is being modified inplace";
    const auto z = leaf(at::full({5}, 0.f), mesh);
    expect_throws<c10::Error>([&] { to_local(z).mul_(2); }, refused);
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const auto y = redistribute(z, {placement}).sigmoid();
      expect_throws<c10::Error>([&] { to_local(y).mul_(2); }, refused);
      const auto whole = full_tensor(y);
      if (placement.is_replicate()) {
        expect_throws<c10::Error>([&] { whole.mul_(2); }, refused);
      } else {
        whole.mul_(2).sum().backward();  // memory of its own
        expect_bit_equal(full_tensor(z.grad()), at::full({5}, 0.5f));
      }
    }
    z.mutable_grad() = at::Tensor();
    to_local(z.sigmoid()).clone().mul_(2).sum().backward();
    expect_bit_equal(full_tensor(z.grad()), at::full({5}, 0.5f));
  });
}

TEST_CASE("a local tensor that has no gradient is written for its DTensor, too", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(at::full({3}, 1.f), mesh);
    {
      const at::NoGradGuard no_grad;
      to_local(x).mul_(2);
    }
    expect_bit_equal(full_tensor(x.detach()), at::full({3}, 2.f));
    const auto plain = x.detach().clone();
    to_local(plain).mul_(3);
    expect_bit_equal(full_tensor(plain), at::full({3}, 6.f));
    to_local(plain).mul_(to_local(x)).sum().backward();  // autograd knows all of it
    expect_bit_equal(full_tensor(x.grad()), at::full({3}, 6.f));
  });
}

TEST_CASE("a local tensor that is taken is written as any result of an op", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto z = leaf(at::full({3}, 0.f), mesh);
    take_local(z * 3).mul_(2).sum().backward();
    expect_bit_equal(full_tensor(z.grad()), at::full({3}, 6.f));
    const auto saved = take_local(z.sigmoid());
    saved.mul_(2);
    expect_throws<c10::Error>([&] { saved.sum().backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("from_local's tensors count each other's writes", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto p = leaf(at::full({4}, 1.f), mesh);
    const auto part = at::full({2}, 3.f);
    const auto product = (p * from_local(part, mesh, {Shard(0)})).sum();
    part.mul_(2);
    expect_throws<c10::Error>([&] { product.backward(); }, "modified by an inplace operation");

    const auto local_leaf = at::full({2}, 0.f).set_requires_grad(true);
    const auto saved = local_leaf.sigmoid();
    const auto d = from_local(saved, mesh, {Shard(0)});
    d.mul_(2);
    expect_throws<c10::Error>([&] { d.sum().backward(); }, "modified by an inplace operation");
  });
}

}  // namespace tessera
