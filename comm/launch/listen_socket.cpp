#include "comm/launch/listen_socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/open_files.h"

namespace tessera {

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const bool failed = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0;
  return {failed ? nullptr : found, freeaddrinfo};
}

bool is_number(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool is_one = getaddrinfo(address.c_str(), nullptr, &hints, &found) == 0;
  const AddressList owner(is_one ? found : nullptr, freeaddrinfo);
  return is_one;
}

bool is_loopback(const addrinfo& entry) {
  if (entry.ai_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(entry.ai_addr)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return entry.ai_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(entry.ai_addr)->sin6_addr);
}

/// Returns addresses to listen on, in order of preference; none: all interfaces.
std::vector<const addrinfo*> places_to_listen(const std::string& address, const addrinfo* found) {
  std::vector<const addrinfo*> places;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    places.push_back(entry);
  }
  if (address == "localhost") {
    std::ranges::stable_sort(places, {}, [](const addrinfo* entry) { return entry->ai_family != AF_INET; });
  } else if (!is_number(address) && (places.size() != 1 || is_loopback(*places[0]))) {
    places.clear();
  }
  return places;
}

/// Returns -1, with errno, on failure.
int try_listen(const addrinfo& place) {
  const int file = above_standard(socket(place.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (file < 0) {
    return -1;
  }
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(file, place.ai_addr, place.ai_addrlen) == 0 && listen(file, SOMAXCONN) == 0) {
    return file;
  }
  const int reason = errno;
  close(file);
  errno = reason;
  return -1;
}

/// Returns the port; 0 if unknown.
int bound_port(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return 0;
  }
  return address_port(address);
}

}  // namespace

int address_port(const sockaddr_storage& address) {
  switch (address.ss_family) {
    case AF_INET:
      return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
    case AF_INET6:
      return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
    default:
      return 0;
  }
}

std::optional<int> take_listen_socket(int port) {
  static std::atomic<bool> taken{false};
  const char* text = std::getenv(kListenSocketVariable);
  if (text == nullptr || bound_port(std::atoi(text)) != port || taken.exchange(true)) {
    return std::nullopt;
  }
  const int file = std::atoi(text);
  fcntl(file, F_SETFD, FD_CLOEXEC);
  return file;
}

std::optional<int> listen_at(const std::string& address, int port) {
  const AddressList found = resolve(address, port);
  for (const addrinfo* place : places_to_listen(address, found.get())) {
    const int file = try_listen(*place);
    if (file >= 0) {
      return file;
    }
    TESSERA_CHECK(CommError, errno != EADDRINUSE && errno != EACCES, "{}:{}: {}", address, port, std::strerror(errno));
  }
  return std::nullopt;
}

}  // namespace tessera
