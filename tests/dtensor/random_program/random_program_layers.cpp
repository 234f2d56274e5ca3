// What layers compute.

#include "tests/dtensor/random_program/random_program_ops.h"

namespace tessera::random_program {

std::optional<Step> multiplying(Scene& scene) {
  const auto a = scene.value(1, 4);
  const auto b = scene.value(1, 4);
  if (!a || !b) {
    return std::nullopt;
  }
  switch (scene.draws.below(8)) {
    case 0:
      return Step{fmt::format("v{}.matmul(v{})", *a, *b), {*a, *b}, [](Read x) { return x[0].matmul(x[1]); }};
    case 1:
      return Step{fmt::format("linear(v{}, v{})", *a, *b), {*a, *b}, [](Read x) { return at::linear(x[0], x[1]); }};
    case 2:
      return Step{fmt::format("outer(v{}, v{})", *a, *b), {*a, *b}, [](Read x) {
                    return at::outer(x[0].flatten(), x[1].flatten());
                  }};
    case 3:
      return Step{fmt::format("addmm(v{} row, v{}, its transpose)", *b, *a), {*a, *b}, [](Read x) {
                    return at::addmm(x[1].flatten().narrow(0, 0, 1), x[0], x[0].t(), 0.5, 2);
                  }};
    case 4:
      return Step{fmt::format("bmm(v{}, transposed v{})", *a, *b), {*a, *b}, [](Read x) {
                    return at::bmm(x[0], x[1].transpose(1, 2));
                  }};
    case 5:
      return Step{fmt::format("einsum(...i,...i, v{}, v{})", *a, *b), {*a, *b}, [](Read x) {
                    return at::einsum("...i,...i->...", {x[0], x[1]});
                  }};
    case 6:
      return Step{fmt::format("linear with bias(v{}, v{})", *a, *b), {*a, *b}, [](Read x) {
                    return at::linear(x[0], x[1], x[1].sum(-1));
                  }};
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

namespace {

/// An op of one value that needs its number of dims.
struct Unary {
  const char* name;
  int64_t dims;
  at::Tensor (*run)(const at::Tensor&);
};

std::optional<Step> draw_unary(Scene& scene, const std::vector<Unary>& ops) {
  const auto& op = scene.draws.of(ops);
  const auto v = scene.value(op.dims, op.dims);
  if (!v) {
    return std::nullopt;
  }
  return Step{fmt::format("v{}: {}", *v, op.name), {*v}, [run = op.run](Read x) { return run(x[0]); }};
}

}  // namespace

std::optional<Step> layer(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<Unary> ops = {
      {"conv1d with its own front", 3, [](T x) { return at::conv1d(x, x.narrow(0, 0, 1).narrow(2, 0, 1)); }},
      {"conv1d, padded", 3, [](T x) { return at::conv1d(x, x.narrow(2, 0, 2), at::Tensor(), 1, at::IntArrayRef{1}); }},
      {"conv1d by channel", 3,
       [](T x) {
         return at::conv1d(x, x.narrow(0, 0, 1).transpose(0, 1).narrow(2, 0, 1), at::Tensor(), 1, at::IntArrayRef{0}, 1,
                           x.size(1));
       }},
      {"conv_transpose1d", 3,
       [](T x) { return at::conv_transpose1d(x, x.narrow(0, 0, 1).transpose(0, 1).narrow(2, 0, 1)); }},
      {"conv2d", 4, [](T x) { return at::conv2d(x, x.narrow(2, 0, 1).narrow(3, 0, 1)); }},
      {"avg_pool1d", 3, [](T x) { return at::avg_pool1d(x, 2, 1, 1); }},
      {"max_pool1d", 3, [](T x) { return at::max_pool1d(x, 2, 1); }},
      {"max_pool2d", 4, [](T x) { return at::max_pool2d(x, 2, 1, 1); }},
      {"avg_pool2d", 4, [](T x) { return at::avg_pool2d(x, 2, 1, 0, true); }},
      {"adaptive_avg_pool1d", 3, [](T x) { return at::adaptive_avg_pool1d(x, 2); }},
      {"adaptive_avg_pool2d", 4,
       [](T x) {
         return at::adaptive_avg_pool2d(x, {2, 1});
       }},
      {"upsample nearest", 3, [](T x) { return at::upsample_nearest1d(x, 2 * x.size(2)); }},
      {"upsample linear", 3, [](T x) { return at::upsample_linear1d(x, 2 * x.size(2), false); }},
      {"upsample bilinear", 4,
       [](T x) {
         return at::upsample_bilinear2d(x, {3, 3}, true);
       }},
      {"reflection_pad1d", 3,
       [](T x) {
         return at::reflection_pad1d(x, {1, 0});
       }},
      {"replication_pad1d", 3,
       [](T x) {
         return at::replication_pad1d(x, {1, 2});
       }},
      {"circular pad", 3,
       [](T x) {
         return at::pad(x, {1, 1}, "circular");
       }},
      {"pixel_shuffle of four", 4,
       [](T x) {
         return at::pixel_shuffle(x.repeat({1, 4, 1, 1}), 2);
       }},
      {"attention with itself", 4, [](T x) { return at::scaled_dot_product_attention(x, x, x.cos()); }},
      {"causal attention", 4, [](T x) { return at::scaled_dot_product_attention(x, x, x, {}, 0, true); }},
      {"batch_norm, training", 3, [](T x) { return at::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"batch_norm of rows", 2, [](T x) { return at::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"instance_norm", 3, [](T x) { return at::instance_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"group_norm(1)", 3, [](T x) { return at::group_norm(x, 1); }},
      {"prelu", 2, [](T x) { return at::prelu(x, x.select(0, 0).abs()); }},
      {"cosine_similarity", 2, [](T x) { return at::cosine_similarity(x, x.sin().add(0.1), 1); }},
      {"pairwise_distance", 2, [](T x) { return at::pairwise_distance(x, x.sin(), 2, 0.1); }},
      {"cdist", 2, [](T x) { return at::cdist(x, x.sin().add(3)); }},
  };
  return draw_unary(scene, ops);
}

std::optional<Step> loss(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<Unary> ops = {
      {"mse_loss", 2, [](T x) { return at::mse_loss(x, x.detach().sin()); }},
      {"mse_loss of both", 1, [](T x) { return at::mse_loss(x, x.sin()); }},
      {"l1_loss", 2, [](T x) { return at::l1_loss(x, x.detach().sin()); }},
      {"smooth_l1_loss", 3, [](T x) { return at::smooth_l1_loss(x, x.detach().cos(), at::Reduction::Mean, 0.5); }},
      {"huber_loss, sum", 2, [](T x) { return at::huber_loss(x, x.detach().cos(), at::Reduction::Sum, 0.5); }},
      {"bce_with_logits", 2, [](T x) { return at::binary_cross_entropy_with_logits(x, x.detach().sigmoid()); }},
      {"bce", 2, [](T x) { return at::binary_cross_entropy(x.sigmoid(), x.detach().cos().square()); }},
      {"kl_div", 2, [](T x) { return at::kl_div(x.log_softmax(1), x.detach().cos().softmax(1)); }},
      {"cross_entropy", 2, [](T x) { return at::cross_entropy_loss(x, x.detach().cos().argmax(1)); }},
      {"cross_entropy, smoothed", 2,
       [](T x) { return at::cross_entropy_loss(x, x.detach().cos().argmax(1), {}, at::Reduction::Mean, -100, 0.1); }},
      {"cross_entropy, ignoring 0", 2,
       [](T x) { return at::cross_entropy_loss(x, x.detach().argmax(1), {}, at::Reduction::Sum, 0); }},
      {"cross_entropy, weights", 2,
       [](T x) { return at::cross_entropy_loss(x, x.detach().argmax(1), x.detach().select(0, 0).abs().add(0.1)); }},
      {"cross_entropy of probabilities", 2, [](T x) { return at::cross_entropy_loss(x, x.detach().cos().softmax(1)); }},
      {"cross_entropy of images", 3, [](T x) { return at::cross_entropy_loss(x, x.detach().cos().argmax(1)); }},
      {"nll_loss, none", 2,
       [](T x) { return at::nll_loss(x.log_softmax(1), x.detach().argmin(1), {}, at::Reduction::None); }},
      {"soft_margin_loss", 2, [](T x) { return at::soft_margin_loss(x, x.detach().sign()); }},
      {"poisson_nll_loss", 2,
       [](T x) { return at::poisson_nll_loss(x, x.detach().square(), true, false, 1e-8, at::Reduction::Mean); }},
  };
  return draw_unary(scene, ops);
}

}  // namespace tessera::random_program
