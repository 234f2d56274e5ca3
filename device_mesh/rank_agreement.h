#pragma once
// Checks that the ranks of a mesh act consistently. An error on one rank then does not leave the others waiting.

#include <functional>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

/// Returns all ranks' texts in the order of mesh.ranks(). All ranks must call it.
std::vector<std::string> all_gather_strings(const DeviceMesh& mesh, const std::string& text);

/// Description of a rank's next step.
struct Statement {
  std::vector<std::string> items;  // this rank's actions, one line each
  std::string fault;               // why it cannot, or empty
};

/// Throws ValueError on every rank unless all statements are equal and none has a fault. It names the first fault or
/// difference. A rank with a fault may throw its own error instead, after the call. All ranks must call it.
void check_agreement(const DeviceMesh& mesh, const std::string& where, const Statement& own);

/// Calls `step`, which returns this rank's items, and checks agreement on each mesh in turn. If `step` throws, this
/// rank rethrows that and the others throw ValueError. All ranks of a mesh must pass the same meshes in the same order.
void check_ranks_agree(const std::vector<DeviceMesh>& meshes, const std::string& where,
                       const std::function<std::vector<std::string>()>& step);
/// Like the above, for items that differ by mesh. A fault on one mesh is reported on the next: pass small ones first.
void check_ranks_agree(const std::vector<DeviceMesh>& meshes, const std::string& where,
                       const std::function<std::vector<std::string>(const DeviceMesh&)>& items_on);

/// Throws StateError on every rank of the meshes if one has a fault. Other ranks' messages begin with `where` and name
/// it. All ranks of a mesh must pass the same meshes in the same order.
void throw_on_all_ranks(const std::vector<DeviceMesh>& meshes, const std::string& where, const std::string& fault);

}  // namespace tessera
