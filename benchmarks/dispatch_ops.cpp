#include "benchmarks/dispatch_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/t.h>
#include <ATen/ops/zeros.h>

#include "dtensor/dtensor.h"

namespace tessera {

namespace {

/// Makes the result and drops it; calls into libtorch cannot be optimized away.
void drop(const at::Tensor&) {}

}  // namespace

const std::vector<DispatchOp>& dispatch_ops() {
  using Operands = DispatchOperands;
  static const std::vector<DispatchOp> ops{
      {"add", [](const Operands& x) { drop(at::add(x.a, x.b)); }},
      {"add_", [](const Operands& x) { x.a.add_(x.b); }},
      {"mm", [](const Operands& x) { drop(at::mm(x.a, x.weight)); }},
      {"t", [](const Operands& x) { drop(at::t(x.a)); }},
      {"view", [](const Operands& x) { drop(x.a.view({64})); }},
      {"sum", [](const Operands& x) { drop(at::sum(x.a)); }},
      {"linear", [](const Operands& x) { drop(at::linear(x.a, x.weight)); }},
      {"redistribute to the same", [](const Operands& x) { drop(redistribute(x.a, {Shard(0)})); }, true},
  };
  return ops;
}

DispatchOperands plain_operands() {
  return {.a = at::ones({8, 8}), .b = at::zeros({8, 8}), .weight = at::ones({8, 8})};
}

DispatchOperands dtensor_operands() {
  const auto mesh = init_device_mesh(at::kCPU, {1});
  const auto plain = plain_operands();
  return {.a = distribute_tensor(plain.a, mesh, {Shard(0)}),
          .b = distribute_tensor(plain.b, mesh, {Shard(0)}),
          .weight = distribute_tensor(plain.weight, mesh, {Replicate()})};
}

}  // namespace tessera
