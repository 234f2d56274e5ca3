#include "debug/metrics_server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <openssl/crypto.h>
#include <sys/socket.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"

namespace tessera {

namespace {

constexpr size_t kShortestToken = 16;
constexpr int kLastPort = 65535;
constexpr size_t kThreads = 2;
constexpr time_t kSeconds = 5;  // time limit for a client

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

/// Compares in a time that does not depend on how much is equal.
bool is_equal(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

class MetricsServer::Server {
 public:
  explicit Server(const Options& options) : token_(options.token) {
    http_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    http_.set_read_timeout(kSeconds);
    http_.set_write_timeout(kSeconds);
    http_.set_payload_max_length(0);
    http_.set_socket_options([](int socket) {  // by default, two servers can share a port
      const int yes = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    });
    http_.Get("/metrics",
              [this](const httplib::Request& request, httplib::Response& response) { answer(request, response); });
    const bool is_bound = options.port == 0 ? (port_ = http_.bind_to_any_port(options.host)) > 0
                                            : http_.bind_to_port(options.host, port_ = options.port);
    TESSERA_CHECK(Error, is_bound, "MetricsServer: {}:{} cannot be listened on", options.host, options.port);
    thread_ = std::thread([this] {
      http_.listen_after_bind();
      has_ended_ = true;
    });
  }

  ~Server() {
    while (!http_.is_running() && !has_ended_) {  // stop() has no effect before that
      std::this_thread::yield();
    }
    http_.stop();
    thread_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }

  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }

 private:
  void answer(const httplib::Request& request, httplib::Response& response) {
    if (!token_.empty() && !is_equal(request.get_header_value("Authorization"), "Bearer " + token_)) {
      response.status = 401;
      response.set_header("WWW-Authenticate", "Bearer");
      return;
    }
    const std::lock_guard lock(mutex_);
    response.set_content(text_, "text/plain; version=0.0.4; charset=utf-8");
  }

  const std::string token_;
  int port_ = 0;
  httplib::Server http_;
  std::mutex mutex_;
  std::string text_;
  std::atomic<bool> has_ended_ = false;
  std::thread thread_;
};

void MetricsServer::check(const Options& options) {
  TESSERA_CHECK(ValueError, options.port >= 0 && options.port <= kLastPort,
                "MetricsServer: port {}; it must be 0 to {}", options.port, kLastPort);
  TESSERA_CHECK(ValueError, options.token.empty() || options.token.size() >= kShortestToken,
                "MetricsServer: a token of {} characters; it needs at least {}", options.token.size(), kShortestToken);
  TESSERA_CHECK(ValueError, !options.token.empty() || is_loopback(options.host),
                "MetricsServer: other hosts reach {}; give a token, or serve at 127.0.0.1", options.host);
}

MetricsServer::MetricsServer(const Options& options) {
  check(options);
  server_ = std::make_unique<Server>(options);
}

MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const {
  return server_->port();
}

void MetricsServer::set(std::string text) {
  server_->set(std::move(text));
}

}  // namespace tessera
