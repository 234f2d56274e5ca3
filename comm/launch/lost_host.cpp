#include "comm/launch/lost_host.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>

namespace tessera {

namespace {

/// Compares internet addresses, ignoring the port.
bool is_same_host(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) {
    return false;
  }
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

bool is_to_another_host(int socket) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof own, peer_length = sizeof peer;
  return getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         (own.ss_family == AF_INET || own.ss_family == AF_INET6) && !is_same_host(own, peer);
}

void set_option(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof value);
}

}  // namespace

void limit_silence(const std::vector<int>& sockets) {
  for (const int socket : sockets) {
    if (is_to_another_host(socket)) {
      set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
      set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);   // seconds without data before the first probe
      set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);  // and between probes
      set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kLongestSilence.count()));
    }
  }
}

}  // namespace tessera
