// Kinds that the host adds. A part of etkv.hpp.
#pragma once

#include <string>

#include "etkv/custom.h"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"

namespace etkv {

/// Kinds of caches by backend and name.
struct BuilderRegistry {
  /// Adds a kind around a kind that exists; see etkv_builder_register.
  /// `context`, and what `vtable` points to, must live as long as the process.
  static Result<void> add(
      const std::string& backend_id,
      const std::string& kind,
      const std::string& base,
      const etkv_cache_vtable& vtable,
      void* context = nullptr) {
    return detail::run([&](etkv_error** error) {
      return etkv_builder_register(
          backend_id.c_str(),
          kind.c_str(),
          base.c_str(),
          &vtable,
          context,
          error);
    });
  }
};

} // namespace etkv
