#pragma once
// Composite ops that create tensors from sizes and numbers alone, such as a causal mask, and combine them with their
// inputs. All ranks create the same, so these tensors count as replicated within the op, unless it gets plain tensors,
// which may differ between ranks. None of these ops draws random numbers except on DTensors.

namespace torch {
class Library;
}

namespace tessera {

/// Overrides the ops under `library`'s key.
void override_with_own_constants(torch::Library& library);

}  // namespace tessera
