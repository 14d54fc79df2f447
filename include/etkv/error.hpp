// An error as a C++ object. A part of etkv.hpp.
#pragma once

#include <string>
#include <utility>

#include "etkv/error.h"

namespace etkv {

/// An error: a status of etkv.h, and a message that names the value and the
/// limit.
class Error {
 public:
  Error(etkv_status status, std::string message)
      : status_(status), message_(std::move(message)) {}

  /// Copies an error object of the C interface, and frees it.
  static Error adopt(etkv_status status, etkv_error* error) {
    Error adopted(status, etkv_error_message(error));
    etkv_error_free(error);
    return adopted;
  }

  etkv_status status() const {
    return status_;
  }
  /// Returns the name of the status, as in "CAPACITY".
  const char* status_name() const {
    return etkv_status_name(status_);
  }
  const std::string& message() const {
    return message_;
  }

 private:
  etkv_status status_;
  std::string message_;
};

} // namespace etkv
