#pragma once
// Composite ops of ATen that make tensors of sizes and numbers alone, such as a causal mask, and mix them with what
// they are given. Every rank makes the same, so that they count as replicated within the op: unless it was given plain
// tensors, which may differ between ranks. None of these ops draws random numbers but on DTensors.

namespace torch {
class Library;
}

namespace tessera {

/// Under the key that `library` is of.
void override_with_own_constants(torch::Library& library);

}  // namespace tessera
