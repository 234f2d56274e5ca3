#pragma once
// Devices for training: --device.
//
// On CUDA each rank takes a GPU of its host, as init_process_group chooses it (comm/nccl/cuda_devices.h), and makes it
// current, so that at::Device(at::kCUDA) means it. CPU tensors, for checkpoints and losses, use gloo.

#include <c10/core/DeviceType.h>

#include <string>

namespace tessera::examples {

/// Parses "cpu" or "cuda". Throws ValueError for other names.
c10::DeviceType parse_device(const std::string& name);

/// Returns ProcessGroupOptions::backend for ranks on such devices.
std::string backend_for(c10::DeviceType device);

/// Throws ValueError, with the remedy, if this build has no such devices. Equal in every process of the program.
void check_is_built_for(c10::DeviceType device);

/// Throws ValueError, with cause and remedy, if this host lacks a device for each of `nproc` ranks. For a program that
/// is about to start them; otherwise init_process_group would throw on each of them.
void check_local_devices(c10::DeviceType device, int nproc);

}  // namespace tessera::examples
