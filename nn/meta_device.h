#pragma once
// Builds modules without memory, on the meta device, whose tensors have only sizes and a dtype.
//
//   Gpt model{nullptr};
//   {
//     const MetaDeviceGuard on_meta;
//     model = Gpt(config);                       // any size, instantly
//   }
//   fully_shard(model, {.mesh = mesh});          // after its blocks
//   to_empty(*model, at::kCPU);                  // fully_shard/to_empty.h: memory for this rank's shards
//   reset_parameters(*model);                    // nn/reset_parameters.h: the values of a single process
//
// libtorch's module.to(at::kMeta) needs the memory first, and throws. Source: Python's `with torch.device("meta"):`.

namespace tessera {

/// Creates this thread's tensors on the meta device while it lives, unless a device is given. Guards nest. Initializers
/// then do nothing and draw no random numbers. Tensors from data (torch::tensor({1, 2})) throw. Thread safety: destroy
/// the guard in the thread that made it.
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
