#pragma once
// How a unit was made, kept with each of its modules: enough to make it again from a copy of them.

#include <map>
#include <string>
#include <vector>

#include "dtensor/spec/dtensor_spec.h"
#include "fully_shard/make_unit.h"

namespace tessera {

struct UnitRecipe {
  /// The modules own this, and so are alive; the mesh is given.
  UnitRequest request;
  /// Where tensor parallelism had put parameters, by their names in the unit.
  std::map<std::string, SpecPtr> tp_specs;
  /// Grows from one unit of a thread to the next: a unit has the parameters that none before it took.
  int64_t number;
};

}  // namespace tessera
