#pragma once
// MetricsServer: the last metrics at http://HOST:PORT/metrics, for Prometheus.
//
//   MetricsServer server({.port = 9090});                  // 127.0.0.1, which this host alone reaches
//   server.set(prometheus_text(values));                   // debug/metrics_log.h
//
// It answers GET only, by HTTP/1.1 without TLS. Where other hosts reach it, requests need the token, as Prometheus
// sends it by `authorization: {credentials: TOKEN}`.

#include <memory>
#include <string>

namespace tessera {

class MetricsServer {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 0;            // 0: a free one
    std::string token = {};  // of at least 16 characters; may be empty where the host is a loopback address
  };

  /// Serves from now on, in threads of its own. Throws ValueError for a host that others reach without a token, and
  /// Error if the port cannot be had.
  explicit MetricsServer(const Options& options);
  /// Throws the ValueErrors alone.
  static void check(const Options& options);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;

  /// Replaces what is served, at first nothing. Thread safety: any thread.
  void set(std::string text);

 private:
  class Server;
  std::unique_ptr<Server> server_;
};

}  // namespace tessera
