#pragma once
// Treats plain tensors next to DTensors as replicated; internal to this package.
//
// In an ImplicitReplication scope this happens above autograd, so that ops save DTensors, and backward needs no scope.
// It uses a key that DTensors have and every thread excludes by default: PrivateUse1's autocast (a DTensor is cast like
// its real device). The scope includes the key, and outside of scopes it costs nothing.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/FunctionRef.h>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Key of every DTensor; excluded in each thread except in an ImplicitReplication scope.
constexpr auto kReplicatingKey = c10::DispatchKey::AutocastPrivateUse1;

/// Returns a DTensor over the memory of `plain`, which is equal on all ranks of `mesh`, without autograd. Autograd
/// detects writes to the plain tensor.
at::Tensor replicated(const at::Tensor& plain, const DeviceMesh& mesh);

/// Returns Replicate for every axis of `mesh`.
Placements copies_on(const DeviceMesh& mesh);

/// Returns whether autograd must record the conversion of a plain tensor.
bool has_gradient_to_record(const at::Tensor& plain);

using MakeReplicated = c10::function_ref<at::Tensor(const at::Tensor& plain, const DeviceMesh& mesh)>;

/// Replaces plain tensors among the last `num_arguments` values on `stack` with the results of `as_copy`. These are on
/// the mesh of the first DTensor there. Replaces tensors of at least one dim and, if `records`, those with a gradient
/// to record.
void replace_plain_tensors(torch::jit::Stack* stack, size_t num_arguments, bool records, MakeReplicated as_copy);

/// Replaces plain tensors of at least one dim on `stack` with replicated DTensors. These are on the mesh of the first
/// DTensor among the last `num_arguments` values.
void apply_implicit_replication(torch::jit::Stack* stack, size_t num_arguments);

}  // namespace tessera
