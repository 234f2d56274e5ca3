// The ops of random programs, one drawing function a family.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dtensor/dtensor.h"
#include "tests/dtensor/random_program.h"

namespace tessera {

namespace {

/// What a drawing function needs: random numbers, and which values there are.
struct Scene {
  Draws& draws;
  const Tensors& values;

  /// A floating value of at least `min_dims` dims.
  std::optional<size_t> value(int64_t min_dims = 0, int64_t max_dims = 9) {
    std::vector<size_t> fitting;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& v = values[i];
      if (v.is_floating_point() && v.dim() >= min_dims && v.dim() <= max_dims) {
        fitting.push_back(i);
      }
    }
    return fitting.empty() ? std::nullopt : std::optional(draws.of(fitting));
  }
  int64_t dim_of(size_t value) { return draws.below(values[value].dim()); }
  std::vector<int64_t> some_dims_of(size_t value) {
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < values[value].dim(); ++dim) {
      if (draws.one_in(2)) {
        dims.push_back(dim);
      }
    }
    return dims;
  }
};

using DrawFunction = std::optional<Step> (*)(Scene&);
using Read = const Tensors&;

/// A plain tensor as the DTensor that goes with `other`, if that is one.
at::Tensor beside(const at::Tensor& plain, const at::Tensor& other) {
  if (!is_dtensor(other)) {
    return plain;
  }
  return from_local(plain, device_mesh(other), Placements(placements(other).size(), Replicate()));
}

std::optional<Step> unary(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&);
  };
  static const std::vector<Op> ops = {
      {"neg", [](const at::Tensor& x) { return x.neg(); }},
      {"tanh", [](const at::Tensor& x) { return x.tanh(); }},
      {"sigmoid", [](const at::Tensor& x) { return x.sigmoid(); }},
      {"relu", [](const at::Tensor& x) { return x.relu(); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"softplus", [](const at::Tensor& x) { return at::softplus(x); }},
      {"abs", [](const at::Tensor& x) { return x.abs(); }},
      {"cos", [](const at::Tensor& x) { return x.cos(); }},
      {"square", [](const at::Tensor& x) { return x.square(); }},
      {"reciprocal of 1 + square", [](const at::Tensor& x) { return x.square().add(1).reciprocal(); }},
      {"add(0.5)", [](const at::Tensor& x) { return x.add(0.5); }},
      {"mul(-1.5)", [](const at::Tensor& x) { return x.mul(-1.5); }},
      {"clamp(-0.5, 0.5)", [](const at::Tensor& x) { return x.clamp(-0.5, 0.5); }},
      {"leaky_relu(0.1)", [](const at::Tensor& x) { return at::leaky_relu(x, 0.1); }},
      {"clone", [](const at::Tensor& x) { return x.clone(); }},
      {"contiguous", [](const at::Tensor& x) { return x.contiguous(); }},
      {"gt(0)", [](const at::Tensor& x) { return x.gt(0); }},
      {"where(x > 0, x, 0.1)", [](const at::Tensor& x) { return at::where(x.gt(0), x, 0.1); }},
      {"masked_fill(x > 0, 2)", [](const at::Tensor& x) { return x.masked_fill(x.gt(0), 2); }},
      {"zeros_like", [](const at::Tensor& x) { return at::zeros_like(x); }},
      {"detach", [](const at::Tensor& x) { return x.detach(); }},
  };
  const auto v = scene.value();
  if (!v) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  return Step{fmt::format("v{}: {}", *v, op.name), {*v}, [run = op.run](Read x) { return run(x[0]); }};
}

std::optional<Step> binary(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&, const at::Tensor&);
  };
  using T = const at::Tensor&;
  static const std::vector<Op> ops = {
      {"add", [](T a, T b) { return a.add(b); }},
      {"sub(alpha 2)", [](T a, T b) { return a.sub(b, 2); }},
      {"mul", [](T a, T b) { return a.mul(b); }},
      {"div(1 + square)", [](T a, T b) { return a.div(b.square().add(1)); }},
      {"maximum", [](T a, T b) { return at::maximum(a, b); }},
      {"where(a > b, a, b)", [](T a, T b) { return at::where(a.gt(b), a, b); }},
      {"addcmul(a, a, b)", [](T a, T b) { return at::addcmul(a, a, b); }},
      {"lerp(a, b, 0.3)", [](T a, T b) { return at::lerp(a, b, 0.3); }},
      {"clone().add_", [](T a, T b) { return a.clone().add_(b); }},
      {"clone().mul_", [](T a, T b) { return a.clone().mul_(b); }},
      {"clone().copy_", [](T a, T b) { return a.clone().copy_(b); }},
  };
  const auto a = scene.value();
  const auto b = scene.value();
  if (!a || !b) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  return Step{
      fmt::format("{}(v{}, v{})", op.name, *a, *b), {*a, *b}, [run = op.run](Read x) { return run(x[0], x[1]); }};
}

std::optional<Step> reduction(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&, at::IntArrayRef dims, bool keepdim);
  };
  using T = const at::Tensor&;
  using D = at::IntArrayRef;
  static const std::vector<Op> ops = {
      {"sum", [](T x, D d, bool k) { return x.sum(d, k); }},
      {"mean", [](T x, D d, bool k) { return x.mean(d, k); }},
      {"amax", [](T x, D d, bool k) { return x.amax(d, k); }},
      {"amin", [](T x, D d, bool k) { return x.amin(d, k); }},
      {"var", [](T x, D d, bool k) { return at::var(x, d, /*unbiased=*/false, k); }},
      {"logsumexp", [](T x, D d, bool k) { return x.logsumexp(d, k); }},
      {"norm(2)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 2, d, k); }},
      {"norm(inf)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, INFINITY, d, k); }},
      {"norm(1)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 1, d, k); }},
  };
  const auto v = scene.value(1);
  if (!v) {
    return std::nullopt;
  }
  const auto dims = scene.some_dims_of(*v);
  const bool keepdim = scene.draws.one_in(2);
  const auto& op = scene.draws.of(ops);
  if (dims.empty()) {
    return std::nullopt;  // means all dims in some of these ops and none in others
  }
  return Step{fmt::format("v{}.{}({{{}}}, {})", *v, op.name, fmt::join(dims, ", "), keepdim),
              {*v},
              [run = op.run, dims, keepdim](Read x) { return run(x[0], dims, keepdim); }};
}

std::optional<Step> whole_reduction(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&);
  };
  using T = const at::Tensor&;
  static const std::vector<Op> ops = {
      {"sum", [](T x) { return x.sum(); }},
      {"mean", [](T x) { return x.mean(); }},
      {"max", [](T x) { return x.max(); }},
      {"min", [](T x) { return x.min(); }},
      {"norm", [](T x) { return x.norm(); }},
      {"prod", [](T x) { return x.prod(); }},
      {"var", [](T x) { return x.var(/*unbiased=*/false); }},
      {"argmax", [](T x) { return x.argmax(); }},
  };
  const auto v = scene.value();
  if (!v) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  return Step{fmt::format("v{}.{}()", *v, op.name), {*v}, [run = op.run](Read x) { return run(x[0]); }};
}

std::optional<Step> along_dim(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&, int64_t dim);
  };
  using T = const at::Tensor&;
  static const std::vector<Op> ops = {
      {"softmax", [](T x, int64_t d) { return x.softmax(d); }},
      {"log_softmax", [](T x, int64_t d) { return x.log_softmax(d); }},
      {"cumsum", [](T x, int64_t d) { return x.cumsum(d); }},
      {"sort values", [](T x, int64_t d) { return std::get<0>(x.sort(d)); }},
      {"sort indices", [](T x, int64_t d) { return std::get<1>(x.sort(d)); }},
      {"max values", [](T x, int64_t d) { return std::get<0>(x.max(d)); }},
      {"max indices", [](T x, int64_t d) { return std::get<1>(x.max(d)); }},
      {"argmin", [](T x, int64_t d) { return x.argmin(d); }},
      {"topk(1) values", [](T x, int64_t d) { return std::get<0>(x.topk(1, d)); }},
      {"flip", [](T x, int64_t d) { return x.flip(d); }},
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
  const auto v = scene.value(1);
  if (!v) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  const int64_t dim = scene.dim_of(*v);
  if (scene.values[*v].size(dim) == 0) {
    return std::nullopt;  // the gradient of parts of an empty dim is a plain tensor, and refused
  }
  return Step{
      fmt::format("v{}: {} of dim {}", *v, op.name, dim), {*v}, [run = op.run, dim](Read x) { return run(x[0], dim); }};
}

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
  switch (scene.draws.below(4)) {
    case 0:
      return Step{fmt::format("v{}.transpose({}, {})", *v, a, b), {*v}, [=](Read x) { return x[0].transpose(a, b); }};
    case 1:
      return Step{fmt::format("v{}.tril()", *v), {*v}, [](Read x) { return x[0].tril(); }};
    case 2:
      return Step{
          fmt::format("v{}.diagonal(0, {}, {})", *v, a, b), {*v}, [=](Read x) { return x[0].diagonal(0, a, b); }};
    default: {
      auto sizes = scene.values[*v].sizes().vec();
      sizes.insert(sizes.begin(), 2);
      return Step{fmt::format("v{}.expand({{{}}})", *v, fmt::join(sizes, ", ")), {*v}, [=](Read x) {
                    return x[0].expand(sizes);
                  }};
    }
  }
}

std::optional<Step> multiplying(Scene& scene) {
  const auto a = scene.value(1, 4);
  const auto b = scene.value(1, 4);
  if (!a || !b) {
    return std::nullopt;
  }
  switch (scene.draws.below(3)) {
    case 0:
      return Step{fmt::format("v{}.matmul(v{})", *a, *b), {*a, *b}, [](Read x) { return x[0].matmul(x[1]); }};
    case 1:
      return Step{fmt::format("linear(v{}, v{})", *a, *b), {*a, *b}, [](Read x) { return at::linear(x[0], x[1]); }};
    default:
      return Step{fmt::format("v{}.matmul(v{}.transpose(0, -1))", *a, *b), {*a, *b}, [](Read x) {
                    return x[0].matmul(x[1].transpose(0, -1));
                  }};
  }
}

std::optional<Step> normalizing(Scene& scene) {
  const auto v = scene.value(1);
  if (!v) {
    return std::nullopt;
  }
  const std::vector<int64_t> shape{scene.values[*v].size(-1)};
  if (scene.draws.one_in(2)) {
    return Step{fmt::format("layer_norm(v{}, {{{}}})", *v, shape[0]), {*v}, [=](Read x) {
                  return at::layer_norm(x[0], shape);
                }};
  }
  return Step{
      fmt::format("rms_norm(v{}, {{{}}})", *v, shape[0]), {*v}, [=](Read x) { return at::rms_norm(x[0], shape); }};
}

}  // namespace

std::optional<Step> draw_step(Draws& draws, const Tensors& values) {
  static const std::vector<DrawFunction> families = {unary,       binary,      reduction, whole_reduction,
                                                     along_dim,   slicing,     reshaping, permuting,
                                                     multiplying, normalizing, along_dim, binary};
  Scene scene{draws, values};
  return draws.of(families)(scene);
}

}  // namespace tessera
