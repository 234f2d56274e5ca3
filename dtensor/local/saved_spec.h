#pragma once
// Saves a spec in an autograd function's forward for its backward.

#include <torch/csrc/autograd/custom_function.h>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// One per function call: a second save_spec replaces the first.
void save_spec(torch::autograd::AutogradContext* context, SpecPtr spec);
SpecPtr saved_spec(torch::autograd::AutogradContext* context);

}  // namespace tessera
