#pragma once
// Counts the arithmetic of training a GPT from its sizes.
//
//   GptConfig{.dim = 64, .layers = 2, .heads = 4, .context = 32}
//     matrix_parameters         114,688 = 2 x 12 x 64 x 64 + 256 x 64
//     training_flops_per_token  737,280 = 6 x 114,688 + 12 x 2 x 64 x 32
//
// This is the standard count of "Scaling Laws for Neural Language Models" (Kaplan et al. 2020, section 2.1) and "PaLM:
// Scaling Language Modeling with Pathways" (Chowdhery et al. 2022, appendix B), which defines model FLOPs utilization
// (MFU) by it. Per token, each parameter of a product costs a multiplication and an addition in forward, and twice that
// in backward, for the gradients of input and parameter. Attention costs 2 x 2 x dim x context per layer in forward,
// for scores and the mean of values, and twice that in backward. This counts the work that the model needs, so
// recomputation does not count, and products that causal attention may skip are not subtracted. Norms, activations,
// biases and embedding look-ups are omitted.
//
// All functions are pure. Thread safety: any thread.

#include "examples/gpt_model.h"

namespace tessera::examples {

/// Returns the scalars in matrices of blocks and the output layer, without embeddings.
double matrix_parameters(const GptConfig& model);

/// Returns floating-point operations per token of a training step, forward and backward.
double training_flops_per_token(const GptConfig& model);

}  // namespace tessera::examples
