#include "debug/link_rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// 100 MB/s between all of three or four ranks, but for some.
LinkRates rates_of(int ranks, const std::vector<SlowLink>& slow) {
  LinkRates rates{.ranks = ranks};
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      double rate = from == to ? 0 : 1e8;
      for (const auto& link : slow) {
        const bool is_one = (link.from < 0 || link.from == from) && (link.to < 0 || link.to == to);
        rate = from != to && is_one ? link.bytes_per_second : rate;
      }
      rates.bytes_per_second.push_back(rate);
    }
  }
  return rates;
}

}  // namespace

TEST_CASE("a slow link, and a rank that sends or receives slowly, are told apart") {
  for (const int ranks : {3, 4}) {
    for (const SlowLink& slow : {SlowLink{1, 2, 2e6}, SlowLink{1, -1, 2e6}, SlowLink{-1, 2, 2e6}}) {
      expect_equal(find_slow_links(rates_of(ranks, {slow})) == std::vector{slow}, true);
    }
  }
  expect_equal(describe(rates_of(3, {{1, -1, 2e6}})),
               std::string("rank 1 sends at 2.0 MB/s; the median of all links is 100 MB/s"));
  expect_equal(describe(rates_of(2, {{1, 0, 2e6}})),
               std::string("rank 1 sends to rank 0 at 2.0 MB/s; the median of all links is 100 MB/s"));
  expect_equal(describe(rates_of(3, {})), std::string("no link is slow: 100 MB/s to 100 MB/s"));
  expect_equal(describe(rates_of(1, {})), std::string("one rank has no links"));
}

TEST_CASE("all pairs of ranks have a rate, the same on all ranks") {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto rates = measure_links(default_group(), {.bytes = 1000});
      for (int from = 0; from < ranks; ++from) {
        for (int to = 0; to < ranks; ++to) {
          expect_equal(rates.rate(from, to) > 0, from != to);
        }
      }
    });
  }
}

// For slow_link_test.sh, with ranks on several hosts.
TEST_CASE("the slow link is printed", "[.slow_link]") {
  init_process_group({.backend = "gloo"});
  const auto rates = measure_links(default_group());
  if (get_rank() == 0) {
    fmt::print("links: {}\n", describe(rates));
    std::fflush(stdout);
  }
  destroy_process_group();
}

}  // namespace tessera::testing
