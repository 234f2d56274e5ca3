// Views, and what moves elements.

#include "tests/dtensor/random_program/random_program_ops.h"

namespace tessera::random_program {

std::optional<Step> slicing(Scene& scene) {
  const auto v = scene.value(1);
  if (!v || scene.values[*v].numel() == 0) {
    return std::nullopt;
  }
  const int64_t dim = scene.dim_of(*v);
  const int64_t size = scene.values[*v].size(dim);
  const int64_t start = scene.draws.below(size);
  const int64_t end = scene.draws.between(start, size);
  const int64_t step = scene.draws.between(1, 3);
  switch (scene.draws.below(5)) {
    case 0:
      return Step{fmt::format("v{}.slice({}, {}, {}, {})", *v, dim, start, end, step), {*v}, [=](Read x) {
                    return x[0].slice(dim, start, end, step);
                  }};
    case 1:
      return Step{
          fmt::format("v{}.select({}, {})", *v, dim, start), {*v}, [=](Read x) { return x[0].select(dim, start); }};
    case 2:
      return Step{fmt::format("v{}.narrow({}, {}, {})", *v, dim, start, end - start), {*v}, [=](Read x) {
                    return x[0].narrow(dim, start, end - start);
                  }};
    case 3:
      return Step{fmt::format("v{}, 7 in clone().narrow({}, {}, {})", *v, dim, start, end - start), {*v}, [=](Read x) {
                    auto y = x[0].clone();
                    y.narrow(dim, start, end - start).fill_(7);
                    return y;
                  }};
    default:
      return Step{fmt::format("constant_pad_nd(v{}, {{{}, {}}}, 0.5)", *v, step, step - 1), {*v}, [=](Read x) {
                    return at::constant_pad_nd(x[0], {step, step - 1}, 0.5);
                  }};
  }
}

/// All ways to write `numel` as sizes are too many: merges and splits of neighbours reach them in several steps.
std::optional<Step> reshaping(Scene& scene) {
  const auto v = scene.value();
  if (!v) {
    return std::nullopt;
  }
  auto sizes = scene.values[*v].sizes().vec();
  const bool merge = sizes.size() >= 2 && scene.draws.one_in(2);
  if (merge) {
    const auto at = static_cast<size_t>(scene.draws.below(static_cast<int64_t>(sizes.size()) - 1));
    sizes[at] *= sizes[at + 1];
    sizes.erase(sizes.begin() + static_cast<int64_t>(at) + 1);
  } else if (!sizes.empty()) {
    const auto at = static_cast<size_t>(scene.draws.below(static_cast<int64_t>(sizes.size())));
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= sizes[at]; ++d) {
      if (sizes[at] % d == 0) {
        divisors.push_back(d);
      }
    }
    if (divisors.empty()) {
      return std::nullopt;
    }
    const int64_t outer = scene.draws.of(divisors);
    sizes[at] /= outer;
    sizes.insert(sizes.begin() + static_cast<int64_t>(at), outer);
  } else {
    sizes = {1, 1};
  }
  const bool reshape = scene.draws.one_in(2);
  return Step{fmt::format("v{}.{}({{{}}})", *v, reshape ? "reshape" : "view", fmt::join(sizes, ", ")),
              {*v},
              [=](Read x) { return reshape ? x[0].reshape(sizes) : x[0].view(sizes); }};
}

std::optional<Step> permuting(Scene& scene) {
  const auto v = scene.value(2);
  if (!v) {
    return std::nullopt;
  }
  const int64_t a = scene.dim_of(*v);
  const int64_t b = scene.dim_of(*v);
  switch (scene.draws.below(9)) {
    case 0:
      return Step{fmt::format("v{}.transpose({}, {})", *v, a, b), {*v}, [=](Read x) { return x[0].transpose(a, b); }};
    case 1:
      return Step{fmt::format("v{}.tril()", *v), {*v}, [](Read x) { return x[0].tril(); }};
    case 2:
      return Step{
          fmt::format("v{}.diagonal(0, {}, {})", *v, a, b), {*v}, [=](Read x) { return x[0].diagonal(0, a, b); }};
    case 3:
      return Step{fmt::format("v{}.mT()", *v), {*v}, [](Read x) { return x[0].mT(); }};
    case 4:
      return Step{fmt::format("v{}.triu(1)", *v), {*v}, [](Read x) { return x[0].triu(1); }};
    case 5:
      return Step{fmt::format("v{}.rot90(1, {{{}, {}}})", *v, a, b), {*v}, [=](Read x) {
                    return x[0].rot90(1, {a, b});
                  }};
    case 6:
      return Step{fmt::format("diag_embed(v{})", *v), {*v}, [](Read x) { return at::diag_embed(x[0]); }};
    case 7: {
      auto repeats = std::vector<int64_t>(static_cast<size_t>(scene.values[*v].dim()), 1);
      repeats[static_cast<size_t>(a)] = 2;
      repeats.insert(repeats.begin(), 2);
      return Step{fmt::format("v{}.repeat({{{}}})", *v, fmt::join(repeats, ", ")), {*v}, [=](Read x) {
                    return x[0].repeat(repeats);
                  }};
    }
    default: {
      auto sizes = scene.values[*v].sizes().vec();
      sizes.insert(sizes.begin(), 2);
      return Step{fmt::format("v{}.expand({{{}}})", *v, fmt::join(sizes, ", ")), {*v}, [=](Read x) {
                    return x[0].expand(sizes);
                  }};
    }
  }
}

std::optional<Step> rearranging(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<AlongDim> ops = {
      {"flip", [](T x, int64_t d) { return x.flip(d); }},
      {"roll(-2)", [](T x, int64_t d) { return x.roll(-2, d); }},
      {"unfold(2, 1)", [](T x, int64_t d) { return x.unfold(d, 2, 1); }},
      {"unfold(2, 2)", [](T x, int64_t d) { return x.unfold(d, 2, 2); }},
      {"unbind back", [](T x, int64_t d) { return x.unbind(d).back(); }},
      {"tensor_split(2) back", [](T x, int64_t d) { return x.tensor_split(2, d).back(); }},
      {"split_with_sizes",
       [](T x, int64_t d) {
         return x.split_with_sizes({1, x.size(d) - 1}, d).back();
       }},
      {"swapdims with -1", [](T x, int64_t d) { return x.swapdims(d, -1); }},
      {"flatten from", [](T x, int64_t d) { return x.flatten(d); }},
      {"unflatten",
       [](T x, int64_t d) {
         return x.unflatten(d, {-1, 1});
       }},
      {"cat of parts",
       [](T x, int64_t d) {
         const auto parts = x.chunk(2, d);
         return at::cat({parts.back(), parts[0]}, d);
       }},
      {"roll(1)", [](T x, int64_t d) { return x.roll(1, d); }},
      {"unsqueeze", [](T x, int64_t d) { return x.unsqueeze(d); }},
      {"squeeze", [](T x, int64_t d) { return x.squeeze(d); }},
      {"unbind front", [](T x, int64_t d) { return x.unbind(d).at(0); }},
      {"chunk(2) back", [](T x, int64_t d) { return x.chunk(2, d).back(); }},
      {"split(2) front", [](T x, int64_t d) { return x.split(2, d).front(); }},
      {"movedim to 0", [](T x, int64_t d) { return x.movedim(d, 0); }},
      {"cat with itself",
       [](T x, int64_t d) {
         return at::cat({x, x.mul(2)}, d);
       }},
      {"stack with itself",
       [](T x, int64_t d) {
         return at::stack({x, x.mul(2)}, d);
       }},
      {"repeat_interleave(2)", [](T x, int64_t d) { return x.repeat_interleave(2, d); }},
      {"index_select 0", [](T x, int64_t d) { return x.index_select(d, beside(at::zeros({3}, at::kLong), x)); }},
      {"gather argmax", [](T x, int64_t d) { return x.gather(d, x.argmax(d, true)); }},
  };
  return draw_along_dim(scene, ops);
}

/// Indices are drawn once, and the same for all ranks.
std::optional<Step> indexing(Scene& scene) {
  const auto v = scene.value(1);
  if (!v || scene.values[*v].numel() == 0) {
    return std::nullopt;
  }
  const int64_t dim = scene.dim_of(*v);
  const int64_t size = scene.values[*v].size(dim);
  std::vector<int64_t> places;
  for (int64_t i = scene.draws.between(1, 4); i > 0; --i) {
    places.push_back(scene.draws.below(size));
  }
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&, int64_t dim, const at::Tensor& places);
  };
  using T = const at::Tensor&;
  static const std::vector<Op> ops = {
      {"index_select", [](T x, int64_t d, T at) { return x.index_select(d, at); }},
      {"index on dim 0", [](T x, int64_t, T at) { return x.index({at.remainder(x.size(0))}); }},
      {"negative index", [](T x, int64_t, T at) { return x.index({at.remainder(x.size(0)) - x.size(0)}); }},
      {"index_add", [](T x, int64_t d, T at) { return x.index_add(d, at, x.index_select(d, at), -2); }},
      {"index_copy of a set",
       [](T x, int64_t d, T at) {
         const auto first = at.narrow(0, 0, 1);
         return x.index_copy(d, first, x.index_select(d, first).mul(3));
       }},
      {"index_fill", [](T x, int64_t d, T at) { return x.index_fill(d, at, 0.3); }},
      {"index_put",
       [](T x, int64_t, T at) {
         const auto row = at.remainder(x.size(0));
         return x.index_put({row}, x.index({row}).mul(2), /*accumulate=*/true);
       }},
      {"scatter_add of gather",
       [](T x, int64_t d, T) {
         const auto at = x.argsort(d);
         return x.scatter_add(d, at, x.gather(d, at));
       }},
      {"scatter of a value", [](T x, int64_t d, T) { return x.scatter(d, x.argmax(d, true), 0.7); }},
      {"scatter_reduce amax",
       [](T x, int64_t d, T) { return x.scatter_reduce(d, x.argsort(d), x.mul(2), "amax", /*include_self=*/true); }},
      {"scatter_reduce mean",
       [](T x, int64_t d, T) {
         return x.scatter_reduce(d, x.argmax(d, true), x.mul(2), "mean", /*include_self=*/false);
       }},
      {"take_along_dim", [](T x, int64_t d, T) { return x.take_along_dim(x.argsort(d), d); }},
      {"masked_select", [](T x, int64_t, T) { return x.masked_select(x.gt(0)); }},
      {"masked_scatter", [](T x, int64_t, T) { return x.masked_scatter(x.gt(0), x.mul(2)); }},
      {"nonzero", [](T x, int64_t, T) { return x.gt(0).nonzero(); }},
      {"bucketize", [](T x, int64_t, T) { return at::bucketize(x, x.detach().flatten().narrow(0, 0, 1)); }},
      {"one_hot", [](T x, int64_t d, T) { return at::one_hot(x.argmax(d), x.size(d)); }},
      {"select_scatter", [](T x, int64_t d, T) { return x.select_scatter(x.select(d, 0).mul(2), d, -1); }},
      {"slice_scatter", [](T x, int64_t d, T) { return x.slice_scatter(x.narrow(d, 0, 1).mul(2), d, 0, 1); }},
      {"embedding", [](T x, int64_t, T at) { return at::embedding(x, at.remainder(x.size(0))); }},
  };
  const auto& op = scene.draws.of(ops);
  return Step{fmt::format("v{}: {} of dim {} at {{{}}}", *v, op.name, dim, fmt::join(places, ", ")),
              {*v},
              [run = op.run, dim, places](Read x) { return run(x[0], dim, beside(at::tensor(places), x[0])); }};
}

}  // namespace tessera::random_program
