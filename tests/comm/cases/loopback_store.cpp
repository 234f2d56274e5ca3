#include "tests/comm/cases/loopback_store.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "testing/expect.h"

namespace tessera::testing {

LoopbackSocket::LoopbackSocket() : file_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  address_.sin_family = AF_INET;
  address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address_;
  auto* const generic = reinterpret_cast<sockaddr*>(&address_);
  TESSERA_EXPECT(bind(file_, generic, length) == 0 && getsockname(file_, generic, &length) == 0);
}

LoopbackSocket::~LoopbackSocket() {
  close(file_);
}

void LoopbackSocket::listen_without_a_word() {
  TESSERA_EXPECT(listen(file_, 5) == 0);
}

bool LoopbackSocket::connect_to(int port) {
  sockaddr_in other = address_;
  other.sin_port = htons(static_cast<uint16_t>(port));
  return connect(file_, reinterpret_cast<sockaddr*>(&other), sizeof other) == 0;
}

int free_port() {
  return LoopbackSocket().port();
}

int launchers_port() {
  return std::atoi(std::getenv("MASTER_PORT"));
}

StoreOptions store_options(int port, int rank, int world_size, std::chrono::milliseconds timeout) {
  return {.address = "127.0.0.1", .port = port, .rank = rank, .world_size = world_size, .timeout = timeout};
}

c10::intrusive_ptr<c10d::Store> connect_beside(c10d::TCPStoreOptions tcp) {
  tcp.port = tcp.port == 0 ? static_cast<uint16_t>(launchers_port()) : tcp.port;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
}

void end_together(int rank) {
  const auto beside = connect_beside();
  if (rank == 0) {
    beside->set("ends/0", std::string());
    beside->wait({"ends/1"});
  } else {
    beside->wait({"ends/0"});
    beside->set("ends/1", std::string());
  }
}

}  // namespace tessera::testing
