#pragma once
// The devices that ranks train on: --device.
//
// On CUDA each rank takes a GPU of its host, as init_process_group chooses it (comm/nccl/cuda_devices.h), and makes it
// the current one, so that at::Device(at::kCUDA) means it. CPU tensors, of which checkpoints and losses make use, go
// over gloo beside it.

#include <c10/core/DeviceType.h>

#include <string>

namespace tessera::examples {

/// "cpu" or "cuda". Throws ValueError for other names.
c10::DeviceType parse_device(const std::string& name);

/// ProcessGroupOptions::backend for ranks on such devices.
std::string backend_for(c10::DeviceType device);

/// Throws ValueError with the remedy if this build has no such devices. The same in every process of the program.
void check_is_built_for(c10::DeviceType device);

/// Throws ValueError with cause and remedy if this host has not a device for each of `nproc` ranks: what
/// init_process_group would throw on each of them. For a program that is about to start them.
void check_local_devices(c10::DeviceType device, int nproc);

}  // namespace tessera::examples
