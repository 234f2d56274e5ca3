#include "debug/metrics_server.h"

#include <fmt/format.h>

#include "base/error.h"
#include "debug/metrics_log.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr const char* kToken = "0123456789abcdef";

}  // namespace

TEST_CASE("Prometheus' client reads what is served, and a request without the token gets nothing") {
  MetricsServer open({.port = 0}), closed({.token = kToken});
  for (auto* const server : {&open, &closed}) {
    server->set("old");
    server->set(prometheus_text({{.name = "train/loss", .value = 2.5}}));
  }
  run_peer_python("prometheus_client", "tests/debug/check_metrics_server.py",
                  fmt::format("{} {} {} tessera_train_loss 2.5", open.port(), closed.port(), kToken));
  expect_throws<Error>([&] { MetricsServer({.port = open.port()}); }, "cannot be listened on");
}

TEST_CASE("a server that other hosts reach needs a token, and one that nobody guesses") {
  expect_throws<ValueError>([] { MetricsServer({.host = "0.0.0.0"}); }, "other hosts reach 0.0.0.0");
  expect_throws<ValueError>([] { MetricsServer({.token = "short"}); }, "a token of 5 characters");
  MetricsServer({.host = "0.0.0.0", .token = kToken});
}

}  // namespace tessera::testing
