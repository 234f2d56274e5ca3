// Writes to views of DTensors, also where the view's data had to be moved: random programs against plain tensors.

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fmt/ranges.h>

#include <functional>
#include <string>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "testing/draws.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Transform = std::function<at::Tensor(const at::Tensor&)>;

/// Views of a tensor, each of the one before, and then writes to the last one. Operands are DTensors as the tensor is.
struct Program {
  std::vector<int64_t> sizes;
  std::vector<Transform> views;
  std::vector<std::function<void(const at::Tensor& view, const Transform& placed)>> writes;
  std::string text;
};

/// Autograd refuses writes to parts of split().
Transform draw_view(Draws& draws, const at::Tensor& x, bool differentiable, std::string& text) {
  const int64_t ndim = x.dim();
  const auto kind = ndim == 0 ? 5 : draws.below(differentiable ? 6 : 7);
  const int64_t dim = ndim == 0 ? 0 : draws.below(ndim);
  const int64_t size = ndim == 0 ? 1 : x.size(dim);
  if (kind == 0 && size > 0) {
    const int64_t index = draws.below(size);
    text += fmt::format(".select({}, {})", dim, index);
    return [=](const at::Tensor& t) { return t.select(dim, index); };
  }
  if (kind <= 2) {
    const int64_t start = draws.below(size + 1), end = draws.between(start, size), step = draws.between(1, 3);
    text += fmt::format(".slice({}, {}, {}, {})", dim, start, end, step);
    return [=](const at::Tensor& t) { return t.slice(dim, start, end, step); };
  }
  if (kind == 3) {
    const int64_t other = draws.below(ndim);
    text += fmt::format(".transpose({}, {})", dim, other);
    return [=](const at::Tensor& t) { return t.transpose(dim, other); };
  }
  if (kind == 4) {
    text += ".squeeze()";
    return [=](const at::Tensor& t) { return t.squeeze(); };
  }
  if (kind == 5) {
    const int64_t at = draws.below(ndim + 1);
    text += fmt::format(".unsqueeze({})", at);
    return [=](const at::Tensor& t) { return t.unsqueeze(at); };
  }
  const int64_t length = draws.between(1, std::max<int64_t>(1, size));
  const int64_t part = draws.below((std::max<int64_t>(1, size) + length - 1) / length);
  text += fmt::format(".split({}, {})[{}]", length, dim, part);
  return [=](const at::Tensor& t) { return t.split(length, dim)[static_cast<size_t>(part)]; };
}

Program draw_program(uint64_t seed, bool differentiable) {
  Draws draws(seed);
  Program program;
  for (int64_t dims = draws.between(1, 3); dims > 0; --dims) {
    program.sizes.push_back(draws.of<int64_t>({1, 2, 3, 4, 5, 7}));
  }
  program.text = fmt::format("seed {}: x of [{}], x", seed, fmt::join(program.sizes, ", "));
  at::Tensor x = at::zeros(program.sizes, at::kDouble);
  for (int64_t count = draws.between(1, 4); count > 0; --count) {
    program.views.push_back(draw_view(draws, x, differentiable, program.text));
    x = program.views.back()(x);
  }
  const auto values = at::randn(x.sizes(), make_generator(seed), at::kDouble);
  for (int64_t count = draws.between(1, 3); count > 0; --count) {
    const auto kind = draws.below(differentiable ? 5 : 7);
    program.text +=
        std::vector<std::string>{".zero_()", ".add_(values)",         ".mul_(3)",   ".copy_(values)",
                                 ".sin_()",  ".div_(view.abs() + 1)", ".uniform_()"}[static_cast<size_t>(kind)];
    program.writes.emplace_back([=](const at::Tensor& view, const Transform& placed) {
      switch (kind) {
        case 0:
          view.zero_();
          break;
        case 1:
          view.add_(placed(values));
          break;
        case 2:
          view.mul_(3);
          break;
        case 3:
          view.copy_(placed(values));
          break;
        case 4:
          view.sin_();
          break;
        case 5:
          view.div_(view.abs() + 1);
          break;
        default:
          tessera::manual_seed(seed);
          view.uniform_(0, 1, is_dtensor(view) ? std::nullopt : std::optional(make_generator(seed)));
      }
    });
  }
  return program;
}

struct Results {
  at::Tensor tensor, view, gradient;
};

Results run_program(const Program& program, const at::Tensor& leaf, const Transform& placed, bool differentiable) {
  at::Tensor x = leaf;
  if (differentiable) {
    leaf.set_requires_grad(true);
    x = leaf * 2;
  }
  auto view = x;
  for (const auto& step : program.views) {
    view = step(view);
  }
  for (const auto& write : program.writes) {
    write(view, placed);
  }
  if (differentiable) {
    (x.square().sum() + view.sin().sum()).backward();
  }
  return {.tensor = x.detach(), .view = view.detach(), .gradient = leaf.grad()};
}

Placements draw_cut_placements(Draws& draws, int64_t axes, int64_t ndim) {
  Placements placements;
  for (int64_t axis = 0; axis < axes; ++axis) {
    placements.push_back(draws.one_in(4) ? Placement(Replicate()) : Placement(Shard(draws.below(ndim))));
  }
  return placements;
}

void check_program(const Program& program, uint64_t seed, const DeviceMesh& mesh, const Placements& placements,
                   bool differentiable) {
  const auto values = at::randn(program.sizes, make_generator(seed), at::kDouble);
  const auto plain = run_program(
      program, values.clone(), [](const at::Tensor& t) { return t; }, differentiable);
  const auto placed = [&](const at::Tensor& t) {
    Draws draws(seed);
    const Placements whole(static_cast<size_t>(mesh.ndim()), Replicate());
    return distribute_tensor(t, mesh, t.dim() > 0 ? draw_cut_placements(draws, mesh.ndim(), t.dim()) : whole);
  };
  auto x = distribute_tensor(values, mesh, placements);
  if (seed % 2 == 0) {  // whose local tensor counts writes together with it
    x = from_local(to_local(x), mesh, placements, {.shape = program.sizes});
  }
  const auto sharded = run_program(program, x, placed, differentiable);
  expect_equal(to_string(tessera::placements(sharded.tensor)), to_string(placements));
  expect_close(full_tensor(sharded.tensor), plain.tensor);
  expect_close(full_tensor(sharded.view), plain.view);
  if (differentiable) {
    expect_close(full_tensor(sharded.gradient), plain.gradient);
  }
}

void check_programs(const std::vector<int64_t>& mesh_shape, int64_t count, bool differentiable) {
  const auto first = number_from_environment("TESSERA_SEED", 1);
  run_ranks(static_cast<int>(c10::multiply_integers(mesh_shape)), [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, mesh_shape);
    for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
      Draws draws(~seed);
      const auto program = draw_program(seed, differentiable);
      const auto placements = draw_cut_placements(draws, mesh.ndim(), static_cast<int64_t>(program.sizes.size()));
      try {
        check_program(program, seed, mesh, placements, differentiable);
      } catch (const std::exception& error) {
        throw ExpectationError(fmt::format("{}, {} on [{}]: {}", program.text, to_string(placements),
                                           fmt::join(mesh_shape, ", "), error.what()));
      }
    }
  });
}

const std::vector<std::vector<int64_t>> kViewMeshes{{1}, {2}, {3}, {4}, {2, 2}, {2, 3}};

}  // namespace

TEST_CASE("writes to random views reach the viewed tensor", "[dtensor]") {
  for (const auto& mesh : kViewMeshes) {
    CHECK_NOTHROW(check_programs(mesh, 1000, /*differentiable=*/false));
  }
}

TEST_CASE("gradients know of writes to random views", "[dtensor]") {
  for (const auto& mesh : kViewMeshes) {
    CHECK_NOTHROW(check_programs(mesh, 300, /*differentiable=*/true));
  }
}

TEST_CASE("a view of moved data sees its own writes; others of the tensor are stale", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)});
    const auto row = x.select(0, 1), other = x.select(0, 3), part = row.narrow(0, 1, 2);
    row.mul_(2);
    row.add_(row);
    expect_bit_equal(full_tensor(row), at::full({3}, 4.F));
    expect_equal(full_tensor(x).sum().item<float>(), 9 + 12.F);
    for (const auto& stale : {other, part}) {
      expect_throws<StateError>([&] { stale + 1; }, "was written since");
      expect_throws<StateError>([&] { stale.zero_(); }, "was written since");
    }
    x.select(0, 1).narrow(0, 1, 2).zero_();
    expect_throws<StateError>([&] { row + 1; }, "was written since");
    x.add_(1);
    expect_throws<StateError>([&] { row.zero_(); }, "was written since");
    expect_bit_equal(full_tensor(x).select(0, 1), at::tensor({5.F, 1.F, 1.F}));
    x.data().select(0, 3).zero_();
    x.index_put_({at::indexing::Slice(0, 1)}, at::scalar_tensor(7));
    expect_bit_equal(full_tensor(x), at::tensor({7, 7, 7, 5, 1, 1, 2, 2, 2, 0, 0, 0}, at::kFloat).view({4, 3}));
  });
}

TEST_CASE("a view of moved data outlives its tensor, and is written all the same", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({4, 3}), mesh, {Shard(0)});
    const auto row = x.t().select(1, 1);  // of a tensor that is gone
    row.zero_();
    expect_equal(full_tensor(x).sum().item<float>(), 9.F);
    x = at::Tensor();
    row.add_(3);
    expect_bit_equal(full_tensor(row), at::full({3}, 3.F));
  });
}

TEST_CASE("on one rank every view shares the tensor's memory, whatever the placement says", "[dtensor]") {
  run_ranks(1, [](int) {
    const auto values = at::randn({4, 4}, make_generator(1));
    const std::vector<Transform> views = {
        [](const at::Tensor& x) { return x.diagonal(); },
        [](const at::Tensor& x) { return x.as_strided({4}, {5}); },
        [](const at::Tensor& x) {
          return x.as_strided({3, 2}, {2, 1}, 1);
        },
        [](const at::Tensor& x) { return x.view({16}).narrow(0, 3, 6); },
    };
    for (const auto& shape : {std::vector<int64_t>{1}, std::vector<int64_t>{1, 1}}) {
      const auto mesh = init_device_mesh(at::kCPU, shape);
      for (const Placement placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        for (const auto& view : views) {
          auto x = distribute_tensor(values.clone(), mesh, Placements(shape.size(), placement));
          auto leaf = values.clone();
          view(x).add_(3);
          view(leaf).add_(3);
          expect_bit_equal(full_tensor(x), leaf);
          x.requires_grad_();
          leaf.requires_grad_();
          for (const auto& input : {x, leaf}) {
            const auto y = input * 2;
            view(y).mul_(view(input));
            y.square().sum().backward();
          }
          expect_close(full_tensor(x.grad()), leaf.grad());
        }
      }
    }
  });
}

TEST_CASE("writes that a viewed tensor would not see are refused on every rank", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const char* const slices = "as the view is not made of slices of its dims";
    expect_throws<NotImplementedError>([&] { x.diagonal().zero_(); }, slices);
    expect_throws<NotImplementedError>([&] { x.diagonal().zero_(); },
                                       "take a new tensor (slice_scatter, select_scatter");
    expect_throws<NotImplementedError>([&] { x.select(0, 1).expand({2, 4}).zero_(); }, slices);
    const auto complex = distribute_tensor(at::ones({4}, at::kComplexFloat), mesh, {Shard(0)});
    expect_throws<NotImplementedError>([&] { at::_conj(complex.narrow(0, 1, 2)).mul_(2); }, slices);
    expect_throws<NotImplementedError>([&] { at::view_as_real(complex.narrow(0, 1, 2)).mul_(2); }, slices);
    const auto row = x.select(0, 1), other = x.select(0, 2);
    expect_throws<NotImplementedError>([&] { at::_foreach_zero_({row, other}); }, "Call it for one at a time");
    const auto sharing = x.view({16});
    at::_foreach_zero_({row});
    expect_equal(full_tensor(x).sum().item<float>(), 12.F);
    expect_equal(full_tensor(row).sum().item<float>(), 0.F);
    sharing.add_(1);
    expect_throws<StateError>([&] { row + 1; }, "was written since");
    const c10::InferenceMode guard;
    const auto inference = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    expect_throws<NotImplementedError>([&] { inference.select(0, 1).zero_(); }, "whose writes nobody counts");
  });
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    const auto x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0), Shard(1)});
    const auto row = x.select(0, 1);
    {
      const ExplicitRedistribution scope;
      expect_throws<StateError>([&] { row.zero_(); }, "would gather what it writes to a view");
    }
    row.zero_();
    expect_equal(full_tensor(x).sum().item<float>(), 12.F);
    const auto sums = redistribute(x, {Shard(0), Partial()});
    expect_throws<NotImplementedError>([&] { sums.select(0, 1).zero_(); }, "views pending sums");
  });
}

}  // namespace tessera
