// The thread that reads before it is asked.

#include "checkpoint/io/read_ahead.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera {
using tessera::dcp::ReadAhead;

TEST_CASE("reads come in order, each once, and never into a place that is in use", "[checkpoint]") {
  constexpr size_t kCount = 200, kDepth = 3;
  std::array<size_t, kDepth> slots{};  // not atomic: tsan would see a read and a use of one slot meet
  ReadAhead ahead(kCount, kDepth, [&](size_t i) { slots[i % kDepth] = i; });
  for (size_t i = 0; i < kCount; ++i) {
    ahead.wait_for(i);
    REQUIRE(slots[i % kDepth] == i);
  }
}

TEST_CASE("reads go ahead as far as the depth says", "[checkpoint]") {
  std::mutex mutex;
  std::condition_variable changed;
  size_t reads = 0;
  ReadAhead ahead(10, 4, [&](size_t) {
    const std::lock_guard lock(mutex);
    ++reads;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return reads == 4; });  // nobody has asked yet
  lock.unlock();
  ahead.wait_for(0);
  lock.lock();
  CHECK(reads == 4);  // 0 is in use
  lock.unlock();
  ahead.wait_for(2);
  lock.lock();
  changed.wait(lock, [&] { return reads == 6; });
}

TEST_CASE("an error comes where its read is waited for, and is the last", "[checkpoint]") {
  std::atomic<size_t> reads{0};
  ReadAhead ahead(10, 4, [&](size_t i) {
    ++reads;
    if (i == 2) {
      throw std::runtime_error("no disk");
    }
  });
  ahead.wait_for(0);
  ahead.wait_for(1);
  expect_throws<std::runtime_error>([&] { ahead.wait_for(2); }, "no disk");
  expect_throws<std::runtime_error>([&] { ahead.wait_for(3); }, "no disk");
  CHECK(reads == 3);
}

TEST_CASE("one that is not waited for ends all the same", "[checkpoint]") {
  std::atomic<size_t> reads{0};
  {
    const ReadAhead ahead(1000, 2, [&](size_t) { ++reads; });
    const ReadAhead nothing(0, 2, [](size_t) { throw std::logic_error("called"); });
  }
  CHECK(reads <= 2);
}

}  // namespace tessera
