// Units in a scope of autocast, which keeps casts of parameters as long as it is open.

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <optional>

#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

constexpr ParityOptions kAutocastTolerance{.tolerance = {.rtol = 1e-5, .atol = 1e-6}};

enum class Casts { Kept, NotKept };

/// Autocast of CPU tensors on this thread. Scopes nest.
class Autocast {
 public:
  explicit Autocast(Casts casts = Casts::Kept)
      : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)), kept_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_cache_enabled(casts == Casts::Kept);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_cache_enabled(kept_);
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool was_enabled_, kept_;
};

void run_micro_batches(Tower& tower, int rank, Casts casts) {
  const Autocast autocast(casts);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    micro_batch_loss(tower, rank, micro_batch).backward();
  }
}

/// All forwards first.
void run_one_backward(Tower& tower, int rank, Casts casts) {
  const Autocast autocast(casts);
  auto loss = micro_batch_loss(tower, rank, 0);
  for (int micro_batch = 1; micro_batch < 3; ++micro_batch) {
    loss = loss + micro_batch_loss(tower, rank, micro_batch);
  }
  loss.backward();
}

/// Where casts are kept, one process sums the gradients of their uses in bfloat16.
void compare_autocast_with_one_process(int world_size, const std::function<void(Tower&)>& shard,
                                       const std::function<void(Tower&, int, Casts)>& run) {
  run_ranks(world_size, [&](int rank) {
    auto reference = filled_tower(), tower = filled_tower();
    shard(tower);
    average_reference(*reference, world_size, [&](int each) { run(reference, each, Casts::NotKept); });
    run(tower, rank, Casts::Kept);
    check_sharded_parity(reference, tower, kAutocastTolerance);
  });
}

}  // namespace

TEST_CASE("micro-batches in one scope of autocast give the gradients of one process", "[autocast]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const std::optional<bool> reshards = GENERATE(std::optional<bool>(), std::optional(true), std::optional(false));
  const auto shard = [&](Tower& tower) { shard_tower(tower, {.reshard_after_forward = reshards}); };
  CHECK_NOTHROW(compare_autocast_with_one_process(world_size, shard, run_micro_batches));
  CHECK_NOTHROW(compare_autocast_with_one_process(world_size, shard, run_one_backward));
}

TEST_CASE("replicate: micro-batches in one scope of autocast give the gradients of one process", "[autocast]") {
  const int world_size = GENERATE(1, 3);
  const auto shard = [](Tower& tower) { replicate(tower); };
  CHECK_NOTHROW(compare_autocast_with_one_process(world_size, shard, run_micro_batches));
  CHECK_NOTHROW(compare_autocast_with_one_process(world_size, shard, run_one_backward));
}

TEST_CASE("a scope of autocast may validate, step and train on", "[autocast]") {
  const int world_size = GENERATE(1, 3);
  run_ranks(world_size, [&](int rank) {
    auto reference = filled_tower(), tower = filled_tower();
    shard_tower(tower);
    const Autocast autocast;
    for (int step = 0; step < 3; ++step) {
      average_reference(*reference, world_size, [&](int each) {
        const Autocast anew(Casts::NotKept);
        micro_batch_loss(reference, each, step).backward();
      });
      at::Tensor expected, validated;
      {
        const at::NoGradGuard no_grad;
        validated = micro_batch_loss(tower, rank, step);
        const Autocast anew(Casts::NotKept);
        expected = micro_batch_loss(reference, rank, step);
      }
      expect_bit_equal(validated, expected);
      micro_batch_loss(tower, rank, step).backward();
      check_sharded_parity(reference, tower, kAutocastTolerance);
      const at::NoGradGuard no_grad;
      for (auto* model : {&reference, &tower}) {
        for (auto& param : (*model)->parameters()) {
          param.sub_(param.grad(), 0.1);
        }
        (*model)->zero_grad();
      }
    }
  });
}

}  // namespace tessera::testing
