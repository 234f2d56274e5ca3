#pragma once
// Modules without memory: tensors on the meta device, which have sizes and a dtype only.
//
//   Gpt model{nullptr};
//   {
//     const MetaDeviceGuard on_meta;
//     model = Gpt(config);                       // of any size, at once
//   }
//   for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});
//   to_empty(*model, at::kCPU);                  // fully_shard/to_empty.h: memory for this rank's shards
//   tessera::manual_seed(0);
//   reset_parameters(*model);                    // nn/reset_parameters.h: one process's values, on any number of ranks
//
// libtorch has no such switch in C++ (module.to(at::kMeta) comes after the memory was there, and throws).
// As `with torch.device("meta"):` in Python.

namespace tessera {

/// Lets this thread make tensors on the meta device while it lives, unless a device is named. Guards nest.
/// Initializers do nothing on them and draw no random numbers; tensors from data (torch::tensor({1, 2})) throw.
/// Thread safety: concerns the thread that made it, which must also end it.
class MetaDeviceGuard {
 public:
  MetaDeviceGuard();
  ~MetaDeviceGuard();
  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;

 private:
  bool was_on_;
};

}  // namespace tessera
