#pragma once
// The socket on which rank 0 listens for the others.

#include <sys/socket.h>

#include <optional>
#include <string>

namespace tessera {

/// How a launcher hands the socket of a reserved port to rank 0: the number of the open file, a socket that listens at
/// MASTER_PORT.
constexpr const char* kListenSocketVariable = "TESSERA_LISTEN_SOCKET";

/// The port of an internet address; 0 for another kind.
int port_of(const sockaddr_storage& address);

/// The launcher's socket, if it is at that port; once in a process, since it is closed with the store that takes it.
std::optional<int> take_listen_socket(int port);

/// A socket that listens at `port` of the one interface that `address` names: a number, localhost, or a name of one
/// address that is not the loopback's. None where that cannot be told: for names of several addresses, for a host's own
/// name that stands for the loopback there and for something else on other hosts, and for addresses of no interface
/// here, as behind a translation of addresses. Throws CommError where the port is taken.
std::optional<int> listen_at(const std::string& address, int port);

}  // namespace tessera
