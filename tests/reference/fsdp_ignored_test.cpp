// FullyShardedDataParallel: what is ignored keeps its values, dtypes and devices.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// The buffer of block1 is to be ignored, that of block0 not.
Tower tower_with_buffers(int rank) {
  auto tower = make_tower();
  for (auto& block : tower->blocks) {
    block->down->register_buffer("scale", at::full({2}, rank + 1.0, at::kFloat));
  }
  return tower;
}

at::Tensor buffer_of(Tower& tower, size_t block) {
  return tower->blocks[block]->down->named_buffers()["scale"];
}

void put_on_meta(const at::Tensor& tensor) {
  const auto without_memory = at::empty_like(tensor.detach(), at::kMeta);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(without_memory.getIntrusivePtr());
}

}  // namespace

TEST_CASE("buffers of ignored modules are neither cast nor sent, those of others are") {
  const bool by_module = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    auto tower = tower_with_buffers(rank);
    FSDPOptions options{.mixed_precision = {.buffer_dtype = at::kBFloat16}, .sync_module_states = true};
    if (by_module) {
      options.ignored_modules = {tower->blocks[1].get()};
    } else {
      options.ignored_states = {buffer_of(tower, 1), tower->blocks[1]->up->weight};
    }
    wrap_module(*tower, options);
    TESSERA_EXPECT(buffer_of(tower, 0).scalar_type() == at::kBFloat16);
    expect_equal(buffer_of(tower, 0)[0].item<float>(), 1.f);
    TESSERA_EXPECT(buffer_of(tower, 1).scalar_type() == at::kFloat);
    expect_equal(buffer_of(tower, 1)[0].item<float>(), static_cast<float>(rank + 1));
    TESSERA_EXPECT(!is_dtensor(tower->blocks[1]->up->weight) && is_dtensor(tower->blocks[0]->up->weight));
  });
}

TEST_CASE("ignored modules and parameters stay on the meta device, and on their own") {
  const bool by_module = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    auto tower = tower_with_buffers(rank);
    FSDPOptions options{.device_id = at::Device(at::kCPU)};
    auto& up = *tower->blocks[1]->up;
    for (const auto& parameter : up.parameters()) {
      put_on_meta(parameter);
    }
    if (by_module) {
      options.ignored_modules = {&up};
    } else {
      options.ignored_states = up.parameters();
    }
    wrap_module(*tower, options);
    TESSERA_EXPECT(up.weight.is_meta() && up.bias.is_meta());
    TESSERA_EXPECT(is_dtensor(tower->blocks[1]->down->weight));

    auto other = tower_with_buffers(rank);
    put_on_meta(other->blocks[0]->up->weight);
    put_on_meta(other->blocks[1]->up->weight);
    std::vector<torch::nn::Module*> filled;
    wrap_module(*other, {.ignored_modules = {other->blocks[1].get()},
                         .param_init_fn = [&](torch::nn::Module& module) { filled.push_back(&module); }});
    expect_equal(filled.size(), 1u);
    TESSERA_EXPECT(filled.at(0) == other->blocks[0]->up.get() && other->blocks[1]->up->weight.is_meta());
  });
}

}  // namespace tessera::testing
