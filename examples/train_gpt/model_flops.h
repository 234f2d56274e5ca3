#pragma once
// How much arithmetic training a GPT needs, counted from its sizes alone.
//
//   GptConfig{.dim = 64, .layers = 2, .heads = 4, .context = 32}
//     matrix_parameters         114,688 = 2 x 12 x 64 x 64 + 256 x 64
//     training_flops_per_token  737,280 = 6 x 114,688 + 12 x 2 x 64 x 32
//
// The standard count: "Scaling Laws for Neural Language Models" (Kaplan et al. 2020, section 2.1) and "PaLM: Scaling
// Language Modeling with Pathways" (Chowdhery et al. 2022, appendix B), which defines model FLOPs utilization (MFU) by
// it. For each token a parameter that takes part in a product costs a multiplication and an addition in forward, and
// twice that in backward, for the gradients of the input and of the parameter. Attention costs 2 x 2 x dim x context a
// layer in forward, for its scores and for the mean of the values, and twice that in backward. So it is what the model
// needs, not what a program does: what backward computes again does not count, and neither is it taken off that causal
// attention may skip half of its products. Norms, activations, biases and look-ups in embeddings are left out.
//
// All functions are pure, for any thread.

#include "examples/gpt_model.h"

namespace tessera::examples {

/// Scalars in the matrices of the blocks and of the output layer; no embeddings, which are looked up.
double matrix_parameters(const GptConfig& model);

/// Floating-point operations for one token of a training step, forward and backward.
double training_flops_per_token(const GptConfig& model);

}  // namespace tessera::examples
