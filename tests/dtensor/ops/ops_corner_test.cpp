// Calls at the edges of what ops take: dtypes, infinities, nothing at all. On plain tensors and on DTensors alike.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "dtensor/dtensor.h"
#include "dtensor/factories.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

at::Tensor tensor(std::initializer_list<double> values, at::ScalarType dtype = at::kFloat) {
  return at::tensor(std::vector<double>(values), at::kDouble).to(dtype);
}

/// `call` gives the same on plain tensors and where they lie as `placements` say, on two ranks.
void expect_same_as_plain(const Tensors& inputs, const std::vector<Placement>& placements,
                          const std::function<at::Tensor(const Tensors&)>& call, Tolerance tolerance = {}) {
  Tensors plain;
  for (const auto& input : inputs) {
    plain.push_back(input.clone());
  }
  const auto expected = call(plain);
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    Tensors sharded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      sharded.push_back(placements[i].is_partial()
                            ? place(inputs[i], mesh, {placements[i]})
                            : distribute_tensor(inputs[i].clone(), mesh, {placements[i]}, {std::nullopt}));
    }
    const auto actual = call(sharded);
    TESSERA_EXPECT(actual.scalar_type() == expected.scalar_type());
    expect_close(full_tensor(actual), expected, tolerance);
  });
}

}  // namespace

TEST_CASE("corners: a mean of cross-entropies whose ignored targets meet an infinite weight, and targets of bytes") {
  const auto weight = tensor({kInf, 1, 2});
  const auto target = at::tensor(std::vector<int64_t>{1, 2, -100, 1});
  const auto loss = [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], x[2]); };
  const auto scores = at::arange(12, at::kFloat).view({4, 3}).cos();
  expect_same_as_plain({scores, target, weight}, {Shard(0), Shard(0), Replicate()}, loss);
  expect_same_as_plain({scores, target, weight}, {Shard(1), Replicate(), Replicate()}, loss);
  const auto wide = at::arange(400, at::kFloat).view({2, 200}).cos();
  const auto bytes = tensor({156, 3}, at::kByte);
  expect_throws<Error>(
      [&] {
        run_ranks(2, [&](int) {
          const auto mesh = init_device_mesh(at::kCPU, {2});
          const auto cut = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Shard(0)}, {std::nullopt}); };
          at::cross_entropy_loss(cut(scores), cut(at::ones({4})));
        });
      },
      "Long");
  const auto unweighted = [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1]); };
  expect_same_as_plain({wide, bytes}, {Shard(0), Shard(0)}, unweighted);
  expect_same_as_plain({wide, bytes}, {Shard(0), Replicate()}, unweighted);
}

TEST_CASE("corners: a pending sum is reduced before a cast to fewer bits") {
  const auto x = tensor({1, -2, 3, 0.5});
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    expect_same_as_plain({x}, {Partial()}, [&](const Tensors& in) { return in[0].to(dtype).to(at::kFloat); });
  }
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto large = from_local(at::full({2}, rank == 0 ? 70000.0F : -69999.0F), mesh, {Partial()});
    expect_bit_equal(full_tensor(large.to(at::kHalf)), at::ones({2}, at::kHalf));
    expect_bit_equal(full_tensor(at::zeros_like(large, at::kHalf).copy_(large)), at::ones({2}, at::kHalf));
    TESSERA_EXPECT(placements(large.to(at::kDouble))[0] == Partial());
    const auto rounded = at::full({2}, rank == 0 ? 70144.0F : -69632.0F, at::kBFloat16);
    expect_bit_equal(full_tensor(from_local(rounded, mesh, {Partial()}).to(at::kHalf)),
                     at::full({2}, 512.0F, at::kHalf));
  });
}

TEST_CASE("corners: reductions into an out tensor compute in its dtype") {
  const auto halves = at::full({4, 2}, 30000.0, at::kHalf);
  const auto whole = at::full({6}, 100000, at::kLong);
  for (const Placement placement : {Placement(Shard(0)), Placement(Replicate())}) {
    expect_same_as_plain({halves, at::zeros({2})}, {placement, Replicate()}, [](const Tensors& x) {
      return at::sum_out(const_cast<at::Tensor&>(x[1]), x[0], at::IntArrayRef{0});
    });
    expect_same_as_plain({whole, at::zeros({}, at::kDouble)}, {placement, Replicate()},
                         [](const Tensors& x) { return at::prod_out(const_cast<at::Tensor&>(x[1]), x[0], 0); });
    expect_same_as_plain({whole, at::zeros({6}, at::kDouble)}, {placement, Replicate()},
                         [](const Tensors& x) { return at::cumprod_out(const_cast<at::Tensor&>(x[1]), x[0], 0); });
    expect_same_as_plain({halves, at::zeros({2})}, {placement, Replicate()}, [](const Tensors& x) {
      return at::mean_out(const_cast<at::Tensor&>(x[1]), x[0], at::IntArrayRef{0});
    });
  }
}

TEST_CASE("corners: a list of tensors as out") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto copies = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Replicate()}, {std::nullopt}); };
    const auto x = distribute_tensor(at::arange(6, at::kFloat).view({2, 3}), mesh, {Shard(1)}, {std::nullopt});
    const Tensors out{copies(at::zeros({3})), copies(at::zeros({3}))};
    at::unbind_copy_out(out, x, 0);
    expect_bit_equal(full_tensor(out[1]), tensor({3, 4, 5}));
  });
}

TEST_CASE("corners: plain numbers beside DTensors, of other dtypes and as indices") {
  const auto floats = at::arange(15, at::kFloat).view({5, 3}).cos();
  const auto half = at::scalar_tensor(0.5, at::kDouble), third = at::scalar_tensor(1. / 3, at::kFloat);
  auto wrapped = at::scalar_tensor(0.25, at::kDouble);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  using Call = std::function<at::Tensor(const Tensors&)>;
  const std::vector<Call> calls = {
      [&](const Tensors& x) { return at::clamp(x[0], third, half); },
      [&](const Tensors& x) { return at::clamp(x[0], wrapped); },
      [&](const Tensors& x) { return at::clamp(x[0], std::nullopt, third); },
      [&](const Tensors& x) { return x[0].clone().to(at::kFloat).clamp_(third, half); },
      [&](const Tensors& x) { return at::addcdiv(x[0], x[0].to(at::kFloat), half); },
      [&](const Tensors& x) { return at::addcmul(x[0], x[0], wrapped.to(at::kLong)); },
      [&](const Tensors& x) { return x[0].clone().to(at::kFloat).addcdiv_(x[0].to(at::kFloat), third, -2); },
  };
  const auto row = at::scalar_tensor(2, at::kLong);
  const std::vector<Call> indexed = {
      [&](const Tensors& x) { return at::index_add(x[0], 0, row, x[0].slice(0, 4)); },
      [&](const Tensors& x) { return at::index_copy(x[0], 0, row, x[0].slice(0, 4)); },
      [&](const Tensors& x) {
        const auto leaf = x[0].detach().requires_grad_();
        return torch::autograd::grad({at::index_select(leaf, 0, row).square().sum()}, {leaf})[0];
      },
  };
  for (const Placement placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
    for (const auto& call : calls) {
      expect_same_as_plain({floats}, {placement}, call);
      expect_same_as_plain({(floats * 4).to(at::kLong)}, {placement}, call);
    }
    for (const auto& call : indexed) {
      expect_same_as_plain({floats}, {placement}, call);
    }
  }
}

TEST_CASE("corners: numbers drawn into a pending norm keep their signs") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({8, 3}), mesh, {Shard(0)}, {std::nullopt});
    auto norms = at::linalg_vector_norm(x, 3, at::IntArrayRef{0});
    norms.uniform_(-2, -1);
    TESSERA_EXPECT(full_tensor(norms).lt(0).all().item<bool>());
    const auto normal = at::normal(0.5, x.abs());
    expect_equal(normal.sizes().vec(), std::vector<int64_t>({8, 3}));
    TESSERA_EXPECT(is_dtensor(normal));
  });
}

TEST_CASE("corners: an infinite alpha of a product over a cut dim") {
  const auto rows = tensor({1, 3, 1, 3}).view({2, 2});
  expect_same_as_plain({at::zeros({2}), rows, tensor({1, -1})}, {Replicate(), Shard(1), Shard(0)},
                       [](const Tensors& x) { return at::addmv(x[0], x[1], x[2], 0, kInf); });
}

TEST_CASE("corners: what one rank's part has that is no probability, all ranks refuse") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto place_all = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Shard(0)}, {std::nullopt}); };
    const auto good = place_all(tensor({0.1, 0.2, 0.3}));
    for (const double bad : {1.5, -0.1, std::numeric_limits<double>::quiet_NaN()}) {
      const auto input = place_all(tensor({0.1, 0.2, bad}));
      expect_throws<ValueError>([&] { at::binary_cross_entropy(input, good); }, "are from 0 to 1");
      expect_throws<ValueError>([&] { at::binary_cross_entropy(good, input); }, "are from 0 to 1");
    }
    const auto one = place_all(tensor({0.4}));
    expect_close(full_tensor(at::binary_cross_entropy(one, one)),
                 at::binary_cross_entropy(tensor({0.4}), tensor({0.4})));
  });
}

TEST_CASE("corners: batch_norm of nothing, and statistics of another length") {
  const auto run = [](const Tensors& x) {
    return at::batch_norm(x[0], x[1], x[2], x[3], x[4], /*training=*/true, 0.1, 1e-5, /*cudnn_enabled=*/false);
  };
  const auto ones = at::ones({3});
  expect_same_as_plain({at::ones({0, 3}), ones, ones, at::zeros({3}), ones},
                       {Shard(0), Replicate(), Replicate(), Replicate(), Replicate()}, run);
  expect_same_as_plain({at::ones({5, 3}), ones, ones, at::zeros({3}), ones},
                       {Shard(0), Replicate(), Replicate(), Replicate(), Replicate()}, run);
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto copies = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Replicate()}, {std::nullopt}); };
    const auto x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)}, {std::nullopt});
    expect_throws<ValueError>(
        [&] {
          run({x, copies(ones), copies(ones), copies(at::zeros({4})), copies(at::ones({4}))});
        },
        "running_mean has 4 elements, and the input 3 channels");
  });
}

TEST_CASE("corners: a convolution of no channels, and attention of nothing") {
  const auto gradients = [](const Tensors& x, const at::Tensor& y) {
    auto all = torch::autograd::grad({y.sum()}, {x[0], x[1]});
    return at::cat({all[0].flatten(), all[1].flatten()});
  };
  for (const int64_t dim : {0, 1, 2}) {
    const Placements placements{Shard(dim), Replicate(), Replicate()};
    const Tensors inputs{at::ones({2, 0, 4}), at::ones({3, 0, 2}), at::ones({3})};
    const std::vector<Placement> all(placements.begin(), placements.end());
    expect_same_as_plain(inputs, all, [](const Tensors& x) { return at::conv1d(x[0], x[1], x[2]); });
    expect_same_as_plain(inputs, all, [&](const Tensors& x) {
      const Tensors leaves{x[0].detach().requires_grad_(), x[1].detach().requires_grad_()};
      return gradients(leaves, at::conv1d(leaves[0], leaves[1], x[2]));
    });
    expect_same_as_plain({at::ones({4, 3, 0, 3})}, {Shard(dim)},
                         [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[0], x[0]); });
  }
}

TEST_CASE("corners: gradients of cumprod with zeros, and of mvlgamma") {
  const auto gradient_of = [](const std::function<at::Tensor(const at::Tensor&)>& op) {
    return [op](const Tensors& x) {
      const auto leaf = x[0].detach().requires_grad_();
      const auto y = op(leaf);
      return torch::autograd::grad({(y * y.detach().cos()).sum()}, {leaf})[0];
    };
  };
  const auto second_gradient_of = [](const std::function<at::Tensor(const at::Tensor&)>& op) {
    return [op](const Tensors& x) {
      const auto leaf = x[0].detach().requires_grad_();
      const auto first = torch::autograd::grad({op(leaf).square().sum()}, {leaf}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({first.square().sum()}, {leaf})[0];
    };
  };
  const auto x = tensor({1, 0, 2, 3, 0, 0, 4, 0, 5, 6, 7, 8, 2, 3, 0}, at::kDouble).view({3, 5});
  const auto cumprod_of = [](int64_t dim) { return [dim](const at::Tensor& in) { return in.cumprod(dim); }; };
  const auto mvlgamma = [](const at::Tensor& in) { return at::mvlgamma(in, 3); };
  for (const Placement placement :
       {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate()), Placement(Partial())}) {
    for (const int64_t dim : {0, 1}) {
      expect_same_as_plain({x}, {placement}, gradient_of(cumprod_of(dim)));
      expect_same_as_plain({x}, {placement}, second_gradient_of(cumprod_of(dim)));
    }
    expect_same_as_plain({x}, {placement}, gradient_of(cumprod_of(-1)));
    expect_same_as_plain({x + 2}, {placement}, [&](const Tensors& in) { return mvlgamma(in[0]); });
    expect_same_as_plain({x + 2}, {placement}, gradient_of(mvlgamma));
    expect_same_as_plain({x + 2}, {placement}, second_gradient_of(mvlgamma));
  }
}

TEST_CASE("corners: zeros like a pending tensor in another dtype, and from_local of a lazily conjugated tensor") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto pending = from_local(at::ones({3}), mesh, {Partial(ReduceOp::Avg)});
    expect_bit_equal(full_tensor(pending.new_zeros({3}, at::kLong)), at::zeros({3}, at::kLong));
    const auto z = at::complex(tensor({1, 2}), tensor({3, 4}));
    expect_bit_equal(full_tensor(at::imag(from_local(z.conj(), mesh, {Replicate()}))), tensor({-3, -4}));
    expect_bit_equal(full_tensor(at::imag(from_local(z, mesh, {Replicate()}).conj())), tensor({-3, -4}));
  });
}

TEST_CASE("corners: losses of a target without dims, and statistics where there is a bias alone") {
  const auto halves = tensor({1, 2, 3, 5}, at::kHalf);
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const Placement placement : {Placement(Shard(0)), Placement(Replicate())}) {
      expect_same_as_plain({halves, at::full({}, 0.5)}, {placement, Replicate()},
                           [&](const Tensors& x) { return at::mse_loss(x[0], x[1], reduction); });
      expect_same_as_plain({halves, at::full({}, 0.5)}, {placement, Replicate()},
                           [&](const Tensors& x) { return at::smooth_l1_loss(x[0], x[1], reduction); });
    }
  }
  expect_same_as_plain({at::arange(12).view({4, 3}).to(at::kBFloat16), at::ones({3})}, {Shard(0), Replicate()},
                       [](const Tensors& x) { return std::get<1>(at::native_layer_norm(x[0], {3}, {}, x[1], 1e-5)); });
}

TEST_CASE("corners: numbers that a dtype cannot hold are refused on every rank, be its part one element or none") {
  run_ranks(4, [](int) {  // parts of 2, 2, 1 and 0 elements
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto half = distribute_tensor(at::ones({5}, at::kHalf), mesh, {Shard(0)});
    expect_throws<std::exception>([&] { half.masked_fill(half.gt(0), -1e9); }, "overflow");
    expect_throws<std::exception>([&] { half.clamp(0, 1e9); }, "overflow");
    expect_throws<std::exception>([&] { half.clone().fill_(1e10); }, "overflow");
    const auto pending = from_local(at::ones({3}, at::kHalf), mesh, {Partial()});  // filled by the first rank alone
    expect_throws<std::exception>([&] { pending.fill_(1e10); }, "overflow");
    expect_bit_equal(full_tensor(pending.fill_(2)), at::full({3}, 2, at::kHalf));
    expect_throws<std::exception>([&] { at::full_like(half, 7e4); }, "overflow");
    expect_throws<std::exception>([&] { half.new_full({3}, 7e4); }, "overflow");
    expect_throws<std::exception>([&] { at::fill(half, 7e4); }, "overflow");
    expect_throws<std::exception>([&] { tessera::full({5}, 7e4, mesh, {Shard(0)}, at::kHalf); }, "overflow");
    expect_throws<std::exception>([&] { tessera::full({2}, 7e4, mesh, {Shard(0)}, at::kHalf); }, "overflow");
    const auto byte = distribute_tensor(at::ones({1}, at::kByte), mesh, {Shard(0)});
    for (const double number : {1., 300.}) {  // the second one finds the plan of the first
      const auto refuse = [&](const auto& call) {
        if (number == 1) {
          expect_equal(full_tensor(call()).template item<int64_t>(), 1);
        } else {
          expect_throws<std::exception>(call, "overflow");
        }
      };
      refuse([&] { return at::full_like(byte, number); });
      refuse([&] { return byte.new_full({1}, number); });
      refuse([&] { return at::fill(byte, number); });
      refuse([&] { return tessera::full({1}, number, mesh, {Shard(0)}, at::kByte); });
    }
    expect_throws<std::exception>([&] { byte.clone().add_(byte, 300); }, "overflow");
    expect_throws<c10::Error>([&] { at::_foreach_lgamma({byte.to(at::kComplexFloat)}); }, "not implemented");
    const auto whole = distribute_tensor(at::ones({5}), mesh, {Shard(0)});
    expect_throws<c10::Error>([&] { at::softshrink(whole, -1.0); }, "lambda");
    expect_close(full_tensor(whole.clamp(0, 0.5)), at::full({5}, 0.5));
    expect_close(full_tensor(half.masked_fill(half.gt(0), 3)), at::full({5}, 3, at::kHalf));
  });
}

TEST_CASE("corners: targets of a dtype that no loss takes are refused on every rank, be its part none") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto scores = distribute_tensor(at::ones({1, 5}), mesh, {Shard(0)});
    const auto images = distribute_tensor(at::ones({1, 5, 1, 1}), mesh, {Shard(0)});
    for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
      const auto target = distribute_tensor(at::ones({1}, at::kInt), mesh, {placement});
      expect_throws<std::exception>([&] { at::nll_loss(scores, target); }, "Long or Byte");
      expect_equal(full_tensor(at::nll_loss(scores, target.to(at::kByte))).item<float>(), -1.f);
      const auto image = target.to(at::kByte).view({1, 1, 1});
      expect_throws<ValueError>([&] { at::nll_loss2d(images, image); }, "classes are Long");
    }
  });
}

TEST_CASE("corners: views that are copies are so on every rank, also one that has nothing") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    auto x = distribute_tensor(at::ones({5}, at::kComplexFloat), mesh, {Shard(0)});
    const auto conjugate = x.conj();
    x.add_(1);
    expect_throws<StateError>([&] { conjugate.add(1); }, "was written since");
  });
}

TEST_CASE("corners: gradients of a batch norm that updates statistics by itself") {
  const auto values = at::arange(24, at::kDouble).view({4, 3, 2}).cos();
  const auto zeros = at::zeros({3}, at::kDouble), ones = at::ones({3}, at::kDouble);
  for (const bool legit : {false, true}) {
    for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      expect_same_as_plain(
          {values, zeros, ones, ones}, {placement, Replicate(), Replicate(), Replicate()}, [=](const Tensors& x) {
            const auto leaf = x[0].detach().requires_grad_();
            auto mean = x[1], variance = x[2];
            const auto y =
                legit ? std::get<0>(at::_native_batch_norm_legit(leaf, x[3], {}, mean, variance, true, 0.1, 1e-5))
                      : std::get<0>(at::_batch_norm_with_update(leaf, x[3], {}, mean, variance, 0.1, 1e-5));
            return torch::autograd::grad({y.pow(3).sum()}, {leaf})[0];
          });
    }
  }
}

TEST_CASE("corners: determinants of a matrix that lies by columns, and their gradients") {
  const auto matrix = at::arange(9, at::kDouble).view({3, 3}).cos() + at::eye(3, at::kDouble);
  for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())}) {
    for (const bool logarithm : {false, true}) {
      expect_same_as_plain({matrix}, {placement}, [=](const Tensors& x) {
        const auto leaf = x[0].detach().requires_grad_();
        const auto value = logarithm ? std::get<1>(at::linalg_slogdet(leaf.t())) : at::linalg_det(leaf.t());
        return torch::autograd::grad({value}, {leaf})[0];
      });
    }
  }
}

TEST_CASE("corners: norms without kernels for tensors that have no data") {
  const auto values = at::arange(5, at::kFloat);
  for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
    expect_same_as_plain({values}, {placement}, [](const Tensors& x) { return at::_foreach_powsum(x, 3)[0]; });
  }
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto whole_numbers = distribute_tensor(at::arange(5), mesh, {Shard(0)});
    const auto nothing = distribute_tensor(at::arange(0), mesh, {Shard(0)});
    expect_throws<std::exception>([&] { at::_foreach_norm({whole_numbers}); },
                                  "Got Long (aten::_foreach_norm.Scalar of DTensors");
    expect_throws<std::exception>([&] { at::linalg_vector_norm(nothing); },
                                  "Got Long (aten::linalg_vector_norm of DTensors");
  });
}

TEST_CASE("corners: losses of an input and a target of different dtypes") {
  using Loss = at::Tensor (*)(const at::Tensor&, const at::Tensor&, int64_t);
  const std::vector<Loss> losses = {
      [](const at::Tensor& x, const at::Tensor& y, int64_t reduction) { return at::mse_loss(x, y, reduction); },
      [](const at::Tensor& x, const at::Tensor& y, int64_t reduction) { return at::smooth_l1_loss(x, y, reduction); },
      [](const at::Tensor& x, const at::Tensor& y, int64_t reduction) { return at::huber_loss(x, y, reduction); },
      [](const at::Tensor& x, const at::Tensor& y, int64_t reduction) { return at::soft_margin_loss(x, y, reduction); },
      [](const at::Tensor& x, const at::Tensor& y, int64_t reduction) {
        return at::binary_cross_entropy_with_logits(x, y, {}, {}, reduction);
      }};
  const auto input = at::arange(12, at::kFloat).view({4, 3}).cos(), target = input.sin().abs();
  for (const auto& [of_input, of_target] : {std::pair(at::kBFloat16, at::kFloat), std::pair(at::kFloat, at::kBFloat16),
                                            std::pair(at::kFloat, at::kDouble)}) {
    for (const auto& loss : losses) {
      for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
        const Tensors inputs = {input.to(of_input), target.to(of_target)};
        const auto gradient = [&](const Tensors& x) {
          const auto leaf = x[0].detach().requires_grad_();
          return torch::autograd::grad({loss(leaf, x[1], reduction).sum()}, {leaf})[0];
        };
        try {
          gradient(inputs);
        } catch (const c10::Error&) {
          continue;  // not all take all dtypes
        }
        for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
          const Tolerance of_16_bits{.rtol = 2e-2, .atol = 1e-3};
          expect_same_as_plain(
              inputs, {placement, placement}, [&](const Tensors& x) { return loss(x[0], x[1], reduction); },
              of_16_bits);
          expect_same_as_plain(inputs, {placement, placement}, gradient, of_16_bits);
        }
      }
    }
  }
}

TEST_CASE("corners: nothing is added to rows, as for an expert without tokens") {
  const auto rows = at::arange(12, at::kFloat).view({4, 3});
  const auto none = at::arange(0);
  for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
    expect_same_as_plain({rows, none}, {placement, Replicate()}, [](const Tensors& x) {
      const auto leaf = x[0].detach().requires_grad_();
      const auto own = leaf.index_select(0, x[1]);
      const auto sum = (leaf * 2).index_add(0, x[1], own).index_add_(0, x[1], own);
      return torch::autograd::grad({sum.square().sum()}, {leaf})[0];
    });
  }
}

TEST_CASE("corners: nothing that does not fit is refused on every rank") {
  run_ranks(4, [](int) {  // a column each, and none
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto place = [&](const at::Tensor& whole, const Placement& placement) {
      return distribute_tensor(whole, mesh, {placement}, {std::nullopt});
    };
    const auto rows = place(at::ones({4, 3}), Shard(1));
    const auto none = place(at::arange(0), Replicate());
    const auto source = [&](std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
      return place(at::ones(sizes, dtype), Replicate());
    };
    expect_throws<ValueError>([&] { rows.index_add(0, none.to(at::kDouble), source({0, 3})); }, "Long or Int");
    expect_throws<ValueError>([&] { rows.index_add(0, none.view({0, 1}), source({0, 3})); }, "a vector");
    expect_throws<ValueError>([&] { rows.index_add(0, none, source({0, 3}, at::kDouble)); }, "one dtype");
    expect_throws<ValueError>([&] { rows.index_add(0, none, source({1, 3})); }, "source needs the sizes of self");
    expect_throws<ValueError>([&] { rows.index_add(0, none, source({0, 2})); }, "source needs the sizes of self");
    expect_throws<ValueError>([&] { rows.clone().index_add_(-2, none, source({0})); }, "along dim -2");
    expect_bit_equal(full_tensor(rows.index_add(0, none.to(at::kInt), source({0, 3}))), at::ones({4, 3}));
  });
}

TEST_CASE("corners: what kernels refuse is refused on every rank, also where it has nothing") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto few = distribute_tensor(at::ones({2, 3}), mesh, {Shard(0)});
    const auto weight = distribute_tensor(at::ones({5, 3}, at::kBFloat16), mesh, {Replicate()});
    const auto whole_numbers = distribute_tensor(at::ones({2, 3}, at::kLong), mesh, {Shard(0)});
    expect_throws<std::exception>([&] { at::linear(few, weight); }, "to have the same dtype");
    expect_throws<std::exception>([&] { at::gelu(whole_numbers); },
                                  "not implemented for 'Long' (aten::gelu of DTensors");
    expect_throws<std::exception>([&] { at::std(whole_numbers, at::OptionalIntArrayRef({1}), 1); },
                                  "only support floating point and complex");
    expect_throws<std::exception>([&] { at::amax(few.to(at::kComplexFloat), {1}); },
                                  "not implemented for 'ComplexFloat'");
    for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      expect_throws<ValueError>([&] { at::softmax(redistribute(whole_numbers, {placement}), 1); }, "floating dtype");
    }
    expect_close(full_tensor(at::linear(few, weight.to(at::kFloat))), at::full({2, 5}, 3.0));
    expect_close(full_tensor(at::std(few, at::OptionalIntArrayRef({1}), 1)), at::zeros({2}));
    const auto signal = distribute_tensor(at::ones({1, 4, 1}), mesh, {Shard(1)});
    const auto window = distribute_tensor(at::ones({2, 2, 3}), mesh, {Replicate()});
    expect_throws<ValueError>([&] { at::conv1d(signal, window, {}, 3, at::IntArrayRef{1}, 2, 2); }, "does not fit");
  });
}

TEST_CASE("corners: the mean cross-entropy of no samples is NaN under every placement") {
  const auto scores = at::ones({0, 3});
  const auto target = at::arange(0);
  for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
    expect_same_as_plain({scores, target}, {placement, placement},
                         [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1]).isnan(); });
  }
}

TEST_CASE("corners: pointwise results of permuted tensors lie as those of plain ones") {
  const auto values = at::arange(24, at::kFloat).view({2, 3, 4}) - 10;
  for (const auto& op : {+[](const at::Tensor& x) { return x.relu(); }, +[](const at::Tensor& x) { return x.abs(); },
                         +[](const at::Tensor& x) { return at::where(x.gt(0), x, -x); }}) {
    for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(2)), Placement(Replicate())}) {
      expect_same_as_plain({values}, {placement}, [&](const Tensors& x) {
        return op(x[0].transpose(1, 2)).transpose(1, 2).view({2, 12});
      });
    }
  }
}

}  // namespace tessera
