#include "dtensor/local/saved_spec.h"

namespace tessera {

namespace {

struct SpecHolder : torch::CustomClassHolder {
  explicit SpecHolder(SpecPtr spec) : spec(std::move(spec)) {}
  SpecPtr spec;
};

}  // namespace

void save_spec(torch::autograd::AutogradContext* context, SpecPtr spec) {
  // Otherwise libtorch would replace an undefined gradient by plain zeros.
  context->set_materialize_grads(false);
  context->saved_data["spec"] = c10::IValue::make_capsule(c10::make_intrusive<SpecHolder>(std::move(spec)));
}

SpecPtr saved_spec(torch::autograd::AutogradContext* context) {
  return static_cast<SpecHolder*>(context->saved_data["spec"].toCapsule().get())->spec;
}

}  // namespace tessera
