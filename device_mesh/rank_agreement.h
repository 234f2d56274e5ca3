#pragma once
// Do the ranks of a mesh do the same? Asked where a fault of one rank would otherwise leave the others waiting.

#include <functional>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

/// The texts of all ranks of `mesh`, in the order of mesh.ranks(), as all_gather_strings of comm/all_gather_strings.h
/// axis by axis.
std::vector<std::string> all_gather_strings(const DeviceMesh& mesh, const std::string& text);

/// What one rank has to say about a step that all ranks take together.
struct Statement {
  std::vector<std::string> items;  // what this rank does, each one line
  std::string fault;               // why it cannot; empty if it can
};

/// Throws ValueError on every rank of `mesh` unless all make the same statement and none has a fault. `where` begins
/// the message, which names the first rank that cannot, or the first item in which ranks differ. A rank with a fault of
/// its own may throw that in place of it, after the call. Collective.
void check_agreement(const DeviceMesh& mesh, const std::string& where, const Statement& own);

/// Calls `step`, which returns what this rank is to do, and checks the agreement of the ranks of each mesh, one after
/// the other: what one finds the next ones are told. A rank on which `step` throws throws that, the others the
/// ValueError. All ranks of a mesh give the same meshes, in the same order. Collective.
void check_ranks_agree(const std::vector<DeviceMesh>& meshes, const std::string& where,
                       const std::function<std::vector<std::string>()>& step);

/// Throws StateError on every rank of the meshes if one has a fault: there with that text, elsewhere with one that
/// begins with `where` and names the rank. All ranks of a mesh give the same meshes, in the same order. Collective.
void throw_on_all_ranks(const std::vector<DeviceMesh>& meshes, const std::string& where, const std::string& fault);

}  // namespace tessera
