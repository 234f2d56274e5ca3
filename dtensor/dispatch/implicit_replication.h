#pragma once
// Plain tensors beside DTensors in an op, taken for replicated ones; internal to this package.
//
// In an ImplicitReplication scope that happens above autograd, so that what an op saves for its backward is a DTensor,
// and backward needs no scope. The way there is a key that DTensors have and every thread leaves out by default, that
// of PrivateUse1's autocast (a DTensor is cast as its real device is): the scope lets it in, and outside of one it
// costs nothing.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/FunctionRef.h>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Part of every DTensor's key set; excluded in each thread but where an ImplicitReplication scope is.
constexpr auto kReplicatingKey = c10::DispatchKey::AutocastPrivateUse1;

/// A plain tensor that every rank of `mesh` has alike, as a DTensor over its memory, without a way back for gradients.
/// What autograd saves of it knows of writes to the plain tensor.
at::Tensor replicated(const at::Tensor& plain, const DeviceMesh& mesh);

/// Replicate along every axis of `mesh`.
Placements copies_on(const DeviceMesh& mesh);

/// Returns true if autograd records what a plain tensor becomes.
bool has_gradient_to_record(const at::Tensor& plain);

using MakeReplicated = c10::function_ref<at::Tensor(const at::Tensor& plain, const DeviceMesh& mesh)>;

/// Replaces plain tensors among the last `num_arguments` values on `stack` by what `as_copy` makes of them on the mesh
/// of the first DTensor there: those of at least one dim, and where `records` those with a gradient to record.
void replace_plain_tensors(torch::jit::Stack* stack, size_t num_arguments, bool records, MakeReplicated as_copy);

/// Makes replicated DTensors of the plain tensors of at least one dim among the last `num_arguments` values on `stack`,
/// on the mesh of the first DTensor there.
void replicate_plain_tensors(torch::jit::Stack* stack, size_t num_arguments);

}  // namespace tessera
