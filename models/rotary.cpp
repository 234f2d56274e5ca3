#include "models/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera::models {

namespace {

using Type = RotaryConfig::Type;

constexpr double kTurn = 2 * std::numbers::pi;

/// Returns theta^(2i / dim), in float32.
at::Tensor powers(double theta, int64_t dim, at::Device device) {
  const auto exponents = at::arange(0, dim, 2, at::TensorOptions(device).dtype(at::kLong)).to(at::kFloat);
  return at::pow(at::Scalar(theta), exponents / static_cast<double>(dim));
}

/// Returns the base, which grows with the length beyond the model's original one.
double dynamic_theta(const RotaryConfig& rotary, const DecoderConfig& config, int64_t length) {
  const auto most = static_cast<double>(config.max_position_embeddings);
  const double scale = rotary.factor * std::max(static_cast<double>(length), most) / most - (rotary.factor - 1);
  const auto dim = static_cast<double>(rotary.rotated_of(config.head_dim));
  return rotary.theta * std::pow(scale, dim / (dim - 2));
}

/// Divides frequencies of long waves by the factor, keeps those of short ones, and blends between.
at::Tensor llama3_frequencies(const RotaryConfig& rotary, const at::Tensor& frequencies) {
  const auto length = static_cast<double>(rotary.original_max_position_embeddings);
  const double longest = length / rotary.low_freq_factor, shortest = length / rotary.high_freq_factor;
  const auto waves = kTurn / frequencies;
  const auto scaled = at::where(waves > longest, frequencies / rotary.factor, frequencies);
  const auto smooth = (length / waves - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor);
  const auto blended = (1 - smooth) * scaled / rotary.factor + smooth * scaled;
  return at::where((waves < shortest).logical_or(waves > longest), scaled, blended);
}

/// Returns the index of the frequency with this number of turns over the original length.
double yarn_index(const RotaryConfig& rotary, double turns, double dim) {
  const auto length = static_cast<double>(rotary.original_max_position_embeddings);
  return dim * std::log(length / (turns * kTurn)) / (2 * std::log(rotary.theta));
}

at::Tensor yarn_frequencies(const RotaryConfig& rotary, const at::Tensor& powers) {
  const double dim = 2 * static_cast<double>(powers.size(0));
  double low = yarn_index(rotary, rotary.beta_fast, dim), high = yarn_index(rotary, rotary.beta_slow, dim);
  if (rotary.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  const double width = low == high ? 0.001 : high - low;
  const auto indices = at::arange(powers.size(0), powers.options());
  const auto kept = 1 - ((indices - low) / width).clamp(0, 1);
  return (1 / (rotary.factor * powers)) * (1 - kept) + (1 / powers) * kept;
}

double yarn_attention_factor(const RotaryConfig& rotary) {
  const auto scale = [&](double mscale) {
    return rotary.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(rotary.factor) + 1;
  };
  if (rotary.attention_factor) {
    return *rotary.attention_factor;
  }
  const bool has_both = rotary.mscale > 0 && rotary.mscale_all_dim > 0;
  return has_both ? scale(rotary.mscale) / scale(rotary.mscale_all_dim) : scale(1);
}

at::Tensor frequencies_of(const RotaryConfig& rotary, const DecoderConfig& config, int64_t length, at::Device device) {
  const double theta = rotary.type == Type::Dynamic ? dynamic_theta(rotary, config, length) : rotary.theta;
  const auto base = powers(theta, rotary.rotated_of(config.head_dim), device);
  switch (rotary.type) {
    case Type::Linear:
      return 1 / base / rotary.factor;
    case Type::Llama3:
      return llama3_frequencies(rotary, 1 / base);
    case Type::Yarn:
      return yarn_frequencies(rotary, base);
    case Type::Default:
    case Type::Dynamic:
      break;
  }
  return 1 / base;
}

}  // namespace

RotaryTables rotary_tables(const RotaryConfig& rotary, const DecoderConfig& config, const at::Tensor& positions,
                           int64_t length, const at::TensorOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto frequencies = frequencies_of(rotary, config, length, options.device());
  const auto half = positions.to(frequencies.scalar_type()).unsqueeze(-1) * frequencies;
  const auto angles = at::cat({half, half}, -1);
  const double factor = rotary.type == Type::Yarn ? yarn_attention_factor(rotary) : 1;
  return {.cos = (angles.cos() * factor).to(options), .sin = (angles.sin() * factor).to(options)};
}

}  // namespace tessera::models
