#include "dtensor/random/kernel_draw.h"

#include "cuda/sharded_draw.h"

namespace tessera {

bool draw_by_kernel(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                    const at::Generator& generator) {
  return local.is_cuda() && cuda::draw_shard(local, shard, parameters, generator);
}

}  // namespace tessera
