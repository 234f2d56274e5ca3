#include "fully_shard/fully_shard.h"

#include "fully_shard/make_unit.h"

namespace tessera {

void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options) {
  make_unit({.api = "fully_shard", .kind = DataParallelKind::Shard, .modules = modules, .options = std::move(options)});
}

void fully_shard(ModuleRef module, FullyShardOptions options) {
  fully_shard(std::vector<torch::nn::Module*>{&*module}, std::move(options));
}

}  // namespace tessera
