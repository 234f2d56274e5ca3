#pragma once
// A spec that an autograd function of this folder keeps from its forward for its backward.

#include <torch/csrc/autograd/custom_function.h>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// One a function call: a second save_spec replaces the first.
void save_spec(torch::autograd::AutogradContext* context, SpecPtr spec);
SpecPtr saved_spec(torch::autograd::AutogradContext* context);

}  // namespace tessera
