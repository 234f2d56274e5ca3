#pragma once
// Autocast keeps casts of parameters while its scope is open: they are made once for all uses in it, of several
// micro-batches, too. A unit cannot use one that was made before:
//
// - Its node is older than those of the unit's border, so that backward would reach it, and the parameter, when the
//   unit has been resharded and reduced.
// - It is of the state in which the parameter was then, sharded or not.
// - It holds the memory of a full parameter.

namespace tessera {

/// Where a unit's call begins and where its parameters change their state: casts are made again. All threads' go.
void forget_autocasts();

}  // namespace tessera
