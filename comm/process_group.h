#pragma once
// Process groups: who takes part in a collective, and over which backend.
