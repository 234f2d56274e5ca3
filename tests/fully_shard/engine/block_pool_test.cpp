// Borrowed memory: what is used again, what is kept, and who gives it back.

#include "fully_shard/memory/block_pool.h"

#include <ATen/ops/full.h>

#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

std::shared_ptr<BlockPool> make_pool() {
  return std::make_shared<BlockPool>(at::kCPU);
}

void* address(const PoolBlockPtr& block) {
  return block->part(0).get();
}

}  // namespace

TEST_CASE("a block that was given back is the next one") {
  const auto pool = make_pool();
  auto first = pool->acquire(1000);
  const void* memory = address(first);
  CHECK(pool->stats().acquired == 1000);
  first.reset();
  CHECK(pool->stats().acquired == 0);
  CHECK(pool->stats().held == 1000);
  const auto second = pool->acquire(600);
  CHECK(address(second) == memory);
  CHECK(second->bytes() == 1000);
  const auto third = pool->acquire(600);
  CHECK(address(third) != memory);
  CHECK(pool->stats().held == 1600);
}

TEST_CASE("the smallest block that fits is taken, and none that is more than twice too large") {
  const auto pool = make_pool();
  auto large = pool->acquire(1500), middle = pool->acquire(1200), small = pool->acquire(500);
  const void* const middle_memory = address(middle);
  large.reset();
  middle.reset();
  small.reset();
  const auto block = pool->acquire(1000);
  CHECK(address(block) == middle_memory);
  const auto tiny = pool->acquire(100);
  CHECK(tiny->bytes() == 100);
}

TEST_CASE("no more than a quarter above the most that was ever acquired is kept") {
  const auto pool = make_pool();
  for (size_t bytes = 1000; bytes < 100000; bytes *= 3) {
    pool->acquire(bytes);
    CHECK(pool->stats().held <= bytes + bytes / 4);
  }
}

TEST_CASE("the peak counts what was acquired at one time") {
  const auto pool = make_pool();
  { const auto a = pool->acquire(100), b = pool->acquire(200); }
  const auto c = pool->acquire(100);
  CHECK(pool->stats().peak == 300);
  pool->reset_peak();
  CHECK(pool->stats().peak == 100);
}

TEST_CASE("tensors hold their block, views see the memory that comes and goes, and the pool may go first") {
  auto pool = make_pool();
  const auto a = tensor_without_memory({2, 3}, at::kFloat), b = tensor_without_memory({4}, at::kFloat);
  CHECK(a.storage().nbytes() == 0);
  auto block = pool->acquire(128);
  set_memory(a, *block, 0, 24);
  const auto view = a.t();
  clear_memory(a);
  CHECK(view.storage().nbytes() == 0);
  set_memory(a, *block, 0, 24);
  set_memory(b, *block, 64, 16);
  block.reset();
  a.fill_(7);
  CHECK(view.equal(at::full({3, 2}, 7.f)));
  CHECK(static_cast<char*>(b.data_ptr()) - static_cast<char*>(a.data_ptr()) == 64);
  clear_memory(a);
  CHECK(a.storage().nbytes() == 0);
  CHECK(pool->stats().acquired == 128);
  clear_memory(b);
  CHECK(pool->stats().acquired == 0);
  PooledBuffer buffer(8, at::kFloat);
  buffer.acquire(*pool).fill_(1);
  pool.reset();
  CHECK(buffer.tensor().sum().item<float>() == 8);
  buffer.release();
  CHECK(buffer.tensor().storage().nbytes() == 0);
}

}  // namespace tessera
