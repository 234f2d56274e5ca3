#pragma once
// Tables of rotary position embedding (fused/rotary.h) as in transformers (J. Su et al., RoFormer, 2021),
// with the scalings that extend a model's context: linear, dynamic (NTK), YaRN (B. Peng et al., 2023), and Llama 3's.
// Pure functions; thread-safe.

#include <ATen/core/Tensor.h>

#include "models/decoder_config.h"

namespace tessera::models {

/// Cosines and sines by position [..., rotary.rotated_of(head_dim)]; the two halves of the last dim are equal.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

/// Computes tables for `positions` of any sizes in float32, then casts them to `options`. All positions are below
/// `length`, which alone determines dynamic scaling, independently of earlier calls.
RotaryTables rotary_tables(const RotaryConfig& rotary, const DecoderConfig& config, const at::Tensor& positions,
                           int64_t length, const at::TensorOptions& options);

}  // namespace tessera::models
