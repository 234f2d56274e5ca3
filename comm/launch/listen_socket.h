#pragma once
// The socket on which rank 0 listens for other ranks.

#include <sys/socket.h>

#include <optional>
#include <string>

namespace tessera {

constexpr const char* kListenSocketVariable = "TESSERA_LISTEN_SOCKET";  // rank 0's descriptor from its launcher

int address_port(const sockaddr_storage& address);  // 0 if it is not an internet address

std::optional<int> take_listen_socket(int port);  // the launcher's; once per process, as its store closes it

/// Returns a socket that listens on the interface of `address` only. Accepts a number, localhost, or a name with a
/// single address that is not a loopback; returns none for others. Throws CommError if the port is taken or denied.
std::optional<int> listen_at(const std::string& address, int port);

}  // namespace tessera
