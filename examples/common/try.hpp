// Macros that return early if a call fails, so that the steps of a runner stay
// readable.
#pragma once

#include <utility>

#include "etkv/etkv.hpp"

#define ETKV_EXAMPLES_JOIN_(a, b) a##b
#define ETKV_EXAMPLES_JOIN(a, b) ETKV_EXAMPLES_JOIN_(a, b)
#define ETKV_EXAMPLES_ASSIGN_(result, left, ...) \
  auto result = (__VA_ARGS__);                   \
  if (!result.ok()) {                            \
    return result.error();                       \
  }                                              \
  left = std::move(result.value())

/// `ASSIGN_OR_RETURN(auto x, call())`: assigns the value, or returns the error.
#define ASSIGN_OR_RETURN(left, ...) \
  ETKV_EXAMPLES_ASSIGN_(            \
      ETKV_EXAMPLES_JOIN(result_at_, __LINE__), left, __VA_ARGS__)

/// `RETURN_IF_ERROR(call())`: continues, or returns the error.
#define RETURN_IF_ERROR(...)                           \
  do {                                                 \
    if (auto outcome = (__VA_ARGS__); !outcome.ok()) { \
      return outcome.error();                          \
    }                                                  \
  } while (false)
