#include "tests/dtensor/random_program/random_program.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "testing/run_ranks.h"

namespace tessera {

namespace {

constexpr size_t kMaxElements = 400;  // of one value, so that a program takes milliseconds

std::vector<int64_t> draw_sizes(Draws& draws) {
  std::vector<int64_t> sizes(static_cast<size_t>(draws.one_in(12) ? 0 : draws.between(1, 4)));
  for (auto& size : sizes) {
    size = draws.one_in(25) ? 0 : draws.between(1, sizes.size() > 2 ? 4 : 7);
  }
  return sizes;
}

/// Sizes that often go together with earlier ones: the same, broadcast, or sharing a dim as matmul needs.
std::vector<int64_t> draw_related_sizes(Draws& draws, const std::vector<int64_t>& first) {
  auto sizes = first;
  switch (draws.below(4)) {
    case 0:
      break;
    case 1:
      for (auto& size : sizes) {
        size = draws.one_in(2) ? 1 : size;
      }
      break;
    case 2:
      if (sizes.size() >= 2) {
        sizes = {sizes.back(), draws.between(1, 5)};
      }
      break;
    default:
      sizes = draw_sizes(draws);
  }
  return sizes;
}

/// Infinities of terms and of the whole may differ (dtensor/spec/placement.h).
bool is_finite(const at::Tensor& value) {
  return value.detach().isfinite().all().item<bool>();
}

bool usable(const at::Tensor& value) {
  return value.defined() && static_cast<size_t>(value.numel()) <= kMaxElements && value.dim() <= 5 && is_finite(value);
}

/// Tries a step on the plain values; none if the op refuses them.
std::optional<at::Tensor> try_step(const Step& step, const Tensors& values) {
  Tensors read;
  for (const size_t index : step.reads) {
    read.push_back(values[index]);
  }
  try {
    auto value = step.run(read);
    return usable(value) ? std::optional(value) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

Tensors gradients_of(const Tensors& inputs, const Tensors& values, bool create_graph) {
  at::Tensor loss;
  for (const auto& value : values) {
    if (value.defined() && value.requires_grad() && value.is_floating_point()) {
      const auto term = value.square().sum();
      loss = loss.defined() ? loss + term : term;
    }
  }
  if (!loss.defined()) {
    return Tensors(inputs.size());
  }
  return torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, create_graph, /*allow_unused=*/true);
}

RandomProgram RandomProgram::draw(uint64_t seed) {
  Draws draws(seed);
  RandomProgram program{.seed = seed, .input_sizes = {}, .steps = {}, .values = {}, .gradients = {}};
  auto generator = make_generator(seed);
  const int64_t num_inputs = draws.between(1, 3);
  for (int64_t i = 0; i < num_inputs; ++i) {
    program.input_sizes.push_back(i == 0 ? draw_sizes(draws) : draw_related_sizes(draws, program.input_sizes[0]));
    program.values.push_back(at::randn(program.input_sizes.back(), generator, at::TensorOptions().dtype(at::kDouble)));
    program.values.back().set_requires_grad(true);
  }
  const int64_t num_steps = draws.between(1, 4);
  for (int attempt = 0; attempt < 40 && static_cast<int64_t>(program.steps.size()) < num_steps; ++attempt) {
    auto step = draw_step(draws, program.values);
    if (!step) {
      continue;
    }
    if (auto value = try_step(*step, program.values)) {
      program.steps.push_back(std::move(*step));
      program.values.push_back(std::move(*value));
    }
  }
  program.differentiate(draws.one_in(4) ? 2 : 1);
  return program;
}

void RandomProgram::differentiate(size_t times) {
  const Tensors inputs(values.begin(), values.begin() + static_cast<int64_t>(input_sizes.size()));
  Tensors of = values;
  while (gradients.size() < times) {
    try {
      of = gradients_of(inputs, of, /*create_graph=*/gradients.size() + 1 < times);
    } catch (const c10::Error&) {
      return;
    }
    if (!std::ranges::all_of(of,
                             [](const at::Tensor& gradient) { return !gradient.defined() || is_finite(gradient); })) {
      return;
    }
    gradients.push_back(of);
  }
}

Tensors RandomProgram::run(const Tensors& inputs) const {
  Tensors values = inputs;
  for (const auto& step : steps) {
    Tensors read;
    for (const size_t index : step.reads) {
      read.push_back(values[index]);
    }
    values.push_back(step.run(read));
  }
  return values;
}

std::string RandomProgram::describe(size_t last) const {
  const size_t num_inputs = input_sizes.size();
  const bool all = last >= values.size();
  last = all ? values.size() - 1 : last;
  std::vector<char> needed(last + 1, all ? 1 : 0);
  needed[last] = 1;
  for (size_t i = last + 1; i-- > num_inputs;) {
    for (const size_t read : steps[i - num_inputs].reads) {
      needed[read] = needed[read] || needed[i];
    }
  }
  std::string text;
  for (size_t i = 0; i <= last; ++i) {
    if (needed[i] && i < num_inputs) {
      text += fmt::format("\n  v{} = input [{}]", i, fmt::join(input_sizes[i], ", "));
    } else if (needed[i]) {
      text += fmt::format("\n  v{} = {}", i, steps[i - num_inputs].text);
    }
  }
  return text;
}

}  // namespace tessera
