// Kinds of caches. A part of etkv.hpp.
#pragma once

#include <string>
#include <vector>

#include "etkv/kinds.h"

namespace etkv {

/// A kind of cache, and the backend that it is for.
struct Kind {
  std::string backend_id;
  std::string name;
};

/// Returns the kinds of caches, in order of backend id and name.
inline std::vector<Kind> kinds() {
  std::vector<Kind> found;
  etkv_kinds(
      [](void* context, const char* backend_id, const char* kind) {
        static_cast<std::vector<Kind>*>(context)->push_back({backend_id, kind});
      },
      &found);
  return found;
}

} // namespace etkv
