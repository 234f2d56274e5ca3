#pragma once
// MetricsServer: serves the latest metrics at http://HOST:PORT/metrics for Prometheus.
//
//   MetricsServer server({.port = 9090});                  // at 127.0.0.1, reachable only from this host
//   server.set(prometheus_text(values));                   // debug/metrics_log.h
//
// It answers only GET requests, over HTTP/1.1 without TLS. If other hosts can reach it, requests need the token, which
// Prometheus sends with `authorization: {credentials: TOKEN}`.

#include <memory>
#include <string>

namespace tessera {

class MetricsServer {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 0;            // 0: any free port
    std::string token = {};  // at least 16 characters; may be empty only if the host is a loopback address
  };

  /// Starts serving in background threads. Throws ValueError for a host that others can reach without a token, and
  /// Error if the port is not available.
  explicit MetricsServer(const Options& options);
  /// Checks the options. Throws the same ValueErrors.
  static void check(const Options& options);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;

  /// Replaces the served text, which is initially empty. Thread safety: any thread.
  void set(std::string text);

 private:
  class Server;
  std::unique_ptr<Server> server_;
};

}  // namespace tessera
