// Reductions, and what looks at all of a dim.

#include "tests/dtensor/random_program/random_program_ops.h"

namespace tessera::random_program {

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
      {"norm(3)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 3, d, k); }},
      {"norm(0)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 0, d, k); }},
      {"norm(-inf)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, -INFINITY, d, k); }},
      {"std", [](T x, D d, bool k) { return at::std(x, d, /*unbiased=*/false, k); }},
      {"mean of var_mean", [](T x, D d, bool k) { return std::get<1>(at::var_mean(x, d, /*unbiased=*/false, k)); }},
      {"nansum", [](T x, D d, bool k) { return x.nansum(d, k); }},
      {"all", [](T x, D d, bool k) { return x.gt(0).all(d, k); }},
      {"any", [](T x, D d, bool k) { return x.gt(0).any(d, k); }},
      {"count_nonzero", [](T x, D d, bool) { return x.relu().count_nonzero(d); }},
      {"2 - norm(2)", [](T x, D d, bool k) { return 2 - at::linalg_vector_norm(x, 2, d, k); }},
      {"norm(2).sub_(3)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 2, d, k).sub_(3); }},
      {"sum.sub_(3)", [](T x, D d, bool k) { return x.sum(d, k).sub_(3); }},
      {"amax.mul_(-1)", [](T x, D d, bool k) { return x.amax(d, k).mul_(-1); }},
      {"norm(1)", [](T x, D d, bool k) { return at::linalg_vector_norm(x, 1, d, k); }},
  };
  const auto v = scene.value();
  if (!v) {
    return std::nullopt;
  }
  const auto dims = scene.some_dims_of(*v);
  const bool keepdim = scene.draws.one_in(2);
  const auto& op = scene.draws.of(ops);
  return Step{fmt::format("v{}.{}({{{}}}, {})", *v, op.name, fmt::join(dims, ", "), keepdim),
              {*v},
              [run = op.run, dims, keepdim](Read x) { return run(x[0], dims, keepdim); }};
}

std::optional<Step> whole_reduction(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<OfOne> ops = {
      {"sum", [](T x) { return x.sum(); }},
      {"mean", [](T x) { return x.mean(); }},
      {"max", [](T x) { return x.max(); }},
      {"min", [](T x) { return x.min(); }},
      {"norm", [](T x) { return x.norm(); }},
      {"prod", [](T x) { return x.prod(); }},
      {"var", [](T x) { return x.var(/*unbiased=*/false); }},
      {"std", [](T x) { return x.std(/*unbiased=*/false); }},
      {"median", [](T x) { return x.median(); }},
      {"sum in float", [](T x) { return x.round().to(at::kFloat).sum(at::kDouble); }},
      {"norm.mul_(-2)", [](T x) { return x.norm().mul_(-2); }},
      {"norm.sub_(10)", [](T x) { return x.norm().sub_(10); }},
      {"1 - norm", [](T x) { return 1 - x.norm(); }},
      {"-norm", [](T x) { return -x.norm(); }},
      {"trace", [](T x) { return x.trace(); }},
      {"any(x > 1)", [](T x) { return x.gt(1).any(); }},
      {"argmin", [](T x) { return x.argmin(); }},
      {"aminmax",
       [](T x) {
         const auto [low, high] = at::aminmax(x);
         return high - low;
       }},
      {"argmax", [](T x) { return x.argmax(); }},
  };
  return draw_of_one(scene, scene.value(), ops);
}

std::optional<Step> along_dim(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<AlongDim> ops = {
      {"softmax", [](T x, int64_t d) { return x.softmax(d); }},
      {"log_softmax", [](T x, int64_t d) { return x.log_softmax(d); }},
      {"cumsum", [](T x, int64_t d) { return x.cumsum(d); }},
      {"sort values", [](T x, int64_t d) { return std::get<0>(x.sort(d)); }},
      {"sort indices", [](T x, int64_t d) { return std::get<1>(x.sort(d)); }},
      {"max values", [](T x, int64_t d) { return std::get<0>(x.max(d)); }},
      {"max indices", [](T x, int64_t d) { return std::get<1>(x.max(d)); }},
      {"argmin", [](T x, int64_t d) { return x.argmin(d); }},
      {"topk(1) values", [](T x, int64_t d) { return std::get<0>(x.topk(1, d)); }},
      {"cumprod", [](T x, int64_t d) { return x.cumprod(d); }},
      {"logcumsumexp", [](T x, int64_t d) { return x.logcumsumexp(d); }},
      {"cummax values", [](T x, int64_t d) { return std::get<0>(x.cummax(d)); }},
      {"cummin indices", [](T x, int64_t d) { return std::get<1>(x.cummin(d)); }},
      {"prod", [](T x, int64_t d) { return x.prod(d); }},
      {"min values", [](T x, int64_t d) { return std::get<0>(x.min(d, true)); }},
      {"median values", [](T x, int64_t d) { return std::get<0>(x.median(d)); }},
      {"kthvalue(1)", [](T x, int64_t d) { return std::get<0>(x.kthvalue(1, d, true)); }},
      {"topk(2, smallest) values", [](T x, int64_t d) { return std::get<0>(x.topk(2, d, false)); }},
      {"argsort", [](T x, int64_t d) { return x.argsort(d, true); }},
      {"renorm", [](T x, int64_t d) { return x.renorm(2, d, 0.7); }},
      {"normalize", [](T x, int64_t d) { return x / x.norm(2, d, true).clamp_min(1e-3); }},
      {"diff", [](T x, int64_t d) { return x.diff(1, d); }},
      {"glu", [](T x, int64_t d) { return at::glu(x, d); }},
      {"softmax of -x", [](T x, int64_t d) { return (-x).softmax(d); }},
      {"logsumexp", [](T x, int64_t d) { return x.logsumexp(d, true); }},
  };
  return draw_along_dim(scene, ops);
}

}  // namespace tessera::random_program
